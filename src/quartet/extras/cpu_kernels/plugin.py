"""Kernels for the CPU: fewer operations and passes over memory, weights in the order that products read."""

from quartet.config.plugins import Plugin, WeightForm

PLUGIN = Plugin(
    weight_form=WeightForm(
        "quartet.extras.cpu_kernels.merged_layers:copies", "quartet.extras.cpu_kernels.fused:install_on_cpu"
    )
)
