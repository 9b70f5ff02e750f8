"""How closely two ways to compute the same thing agree, by the lower of their dtypes: ``(atol, rtol)``.

One table for all tests. A test that needs more than this has found an error; it does not get its own number.
"""

import torch

TOLERANCES: dict[torch.dtype, tuple[float, float]] = {
    torch.float64: (1e-10, 1e-9),
    torch.float32: (1e-5, 1e-5),
    torch.float16: (2e-3, 2e-3),
    torch.bfloat16: (2e-2, 2e-2),
}
