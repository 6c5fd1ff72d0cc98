// What the host code of every op needs of tensors, on LibTorch's stable ABI (torch >= 2.10).
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace fastlayers {

using torch::stable::Tensor;

inline int32_t dtype_of(const Tensor& t) {
  int32_t dtype;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(t.get(), &dtype));
  return dtype;
}

// An uninitialised tensor of like's dtype and device.
inline Tensor empty_strided(const Tensor& like, const std::vector<int64_t>& sizes,
                            const std::vector<int64_t>& strides) {
  int32_t device_type, device_index;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(like.get(), &device_type));
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(like.get(), &device_index));
  AtenTensorHandle handle;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.data(),
                                                         strides.data(), dtype_of(like), device_type,
                                                         device_index, &handle));
  return Tensor(handle);
}

// (*, N, F) in memory order, or (*, F, N) where channel_last.
inline Tensor empty_features(const Tensor& like, std::vector<int64_t> sizes, bool channel_last) {
  const size_t dim = sizes.size();
  std::vector<int64_t> strides(dim);
  int64_t step = 1;
  for (size_t d = dim; d-- > 0;) {
    strides[d] = step;
    step *= sizes[d] > 0 ? sizes[d] : 1;
  }
  if (channel_last) {
    strides[dim - 2] = 1;
    strides[dim - 1] = sizes[dim - 2] > 0 ? sizes[dim - 2] : 1;
  }
  return empty_strided(like, sizes, strides);
}

inline Tensor empty_flat(const Tensor& like) { return empty_strided(like, {0}, {1}); }

// Strides of (*, N, F) read as (B, N, F). Fails where the leading dimensions have no one stride.
struct Flat {
  int64_t batch, batch_stride, list_stride, feature_stride;
};

inline bool flatten_lead(const Tensor& t, Flat* flat) {
  const auto sizes = t.sizes();
  const auto strides = t.strides();
  const size_t lead = sizes.size() - 2;
  *flat = {1, 0, strides[lead], strides[lead + 1]};
  for (size_t d = lead; d-- > 0;) {
    if (sizes[d] == 1) continue;
    if (flat->batch == 1) {
      flat->batch_stride = strides[d];
    } else if (strides[d] != flat->batch_stride * flat->batch) {
      return false;
    }
    flat->batch *= sizes[d];
  }
  return true;
}

// Tells whether (*, N, F) lies in memory as (*, F, N) and not as (*, N, F); is_channel_last in _reference.py.
inline bool is_channel_last(const Tensor& t) {
  if (t.is_contiguous()) return false;
  const auto sizes = t.sizes();
  const auto strides = t.strides();
  const size_t dim = sizes.size();
  int64_t step = 1;
  for (size_t i = 0; i < dim; ++i) {
    const size_t d = i == 0 ? dim - 2 : i == 1 ? dim - 1 : dim - 1 - i;
    if (sizes[d] != 1 && strides[d] != step) return false;
    step *= sizes[d];
  }
  return true;
}

}  // namespace fastlayers
