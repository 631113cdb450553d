"""Turns any framework's tensor into flat memory and back, and reduces such memory.

- `registry`: finds the adapter of a tensor; `frameworks`: imports the adapters of torch and TensorFlow by name;
  `numpy_adapter`: the adapter of NumPy's arrays; `array_api`: the adapter of other arrays of the array API standard.
- `device_registry`: finds the `Device` of an array on a GPU; `cupy_device`: the `Device` by CuPy; `held`: tensors whose memory
  a device still uses.
- `reduction`: how the values of the ranks become one; `halves`: float16 and bfloat16 by way of float32.
- `compression`: the compressors of gradients.
"""
