"""Reads any framework's tensor as flat memory, makes tensors of flat memory, and reduces such memory.

- `registry`: which adapter reads a tensor. `numpy_adapter`, `array_api`: the adapters of NumPy's arrays and of arrays of the
  array API standard. `frameworks`: where the adapters of torch and TensorFlow are.
- `device_registry`: which `Device` works on an array. `cupy_device`: the device of CuPy. `held`: memory in use by a device.
- `reduction`: how the values of the ranks become one. `halves`: float16 and bfloat16 by way of float32.
- `compression`: makes gradients smaller for the exchange.
"""
