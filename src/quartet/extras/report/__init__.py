"""A run directory as one self-contained HTML file that works offline.

``collect`` reads the directory, ``samples`` chooses the rollouts to embed, ``build`` puts data, style and
script into the page. The page itself is ``assets/``: one template, one style sheet, and plain scripts joined
in the order of :data:`quartet.extras.report.build.SCRIPTS`.
"""
