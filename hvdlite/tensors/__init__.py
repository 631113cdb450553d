"""Any framework's tensor as flat memory and back, and how such memory is added.

- `registry`: which adapter a tensor has. `frameworks`: those of torch and TensorFlow, by name; `numpy_adapter`, `array_api`:
  NumPy's arrays, and those of the array API standard.
- `device_registry`: which device an array is on. `cupy_device`: CuPy's; `held`: memory that a device still uses.
- `reduction`: how the values of the ranks become one; `halves`: halves in float32.
- `compression`: gradients made smaller for the exchange.
"""
