// The geometry of a tensor in its storage, as in `values.py`, and tensors made with a given geometry.

#pragma once

#include <ATen/ops/_conj.h>
#include <ATen/ops/_neg_view.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>

#include <array>
#include <cstring>

#include "torch_names.h"

namespace memfit {

struct Geometry {
  c10::SmallVector<int64_t, 6> size;
  c10::SmallVector<int64_t, 6> stride;
  int64_t offset;
  at::ScalarType dtype;
  bool is_conj;
  bool is_neg;

  explicit Geometry(const Tensor& tensor)
      : size(tensor.sizes().begin(), tensor.sizes().end()),
        stride(tensor.strides().begin(), tensor.strides().end()),
        offset(tensor.storage_offset()),
        dtype(tensor.scalar_type()),
        is_conj(tensor.is_conj()),
        is_neg(tensor.is_neg()) {}
};

// A tensor over the storage of `base`, hidden from dispatch modes.
inline Tensor strided_over(const Tensor& base, at::ScalarType dtype, at::IntArrayRef size, at::IntArrayRef stride,
                           int64_t offset) {
  auto keys = base.key_set().remove(c10::DispatchKey::Conjugate).remove(c10::DispatchKey::Negative);
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(base.storage()), keys,
                                                         c10::scalarTypeToTypeMeta(dtype));
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset);
  return tensor;
}

// The whole storage of the tensor as bytes; the tensor's own elements may cover only a part.
inline Tensor storage_as_bytes(const Tensor& tensor) {
  const auto num_bytes = static_cast<int64_t>(tensor.storage().nbytes());
  return strided_over(tensor, at::kByte, {num_bytes}, {1}, 0);
}

inline Tensor tensor_with(const Geometry& geometry, const Tensor& base) {
  Tensor tensor = base;
  if (base.scalar_type() != geometry.dtype || base.sizes() != at::IntArrayRef(geometry.size) ||
      base.strides() != at::IntArrayRef(geometry.stride) || base.storage_offset() != geometry.offset) {
    tensor = strided_over(base, geometry.dtype, geometry.size, geometry.stride, geometry.offset);
  }
  if (geometry.is_conj != tensor.is_conj()) tensor = at::_conj(tensor);
  if (geometry.is_neg != tensor.is_neg()) tensor = at::_neg_view(tensor);
  return tensor;
}

inline Tensor empty_with(const Geometry& geometry, at::Device device) {
  return at::empty_strided(geometry.size, geometry.stride, at::TensorOptions().dtype(geometry.dtype).device(device));
}

// A copy of a number that was wrapped in a tensor. Like the rest of a record, it takes no memory of the allocator.
inline Tensor uncounted_number(const Tensor& number) {
  using Bytes = std::array<char, sizeof(c10::complex<double>)>;
  if (!number.is_cpu() || number.numel() != 1) return number;
  auto* bytes = new Bytes;
  std::memcpy(bytes->data(), number.const_data_ptr(), number.itemsize());
  auto copy = at::from_blob(bytes->data(), number.sizes(), [bytes](void*) { delete bytes; }, number.options());
  copy.unsafeGetTensorImpl()->set_wrapped_number(true);
  return copy;
}

inline int64_t version_of(const Tensor& tensor) { return tensor.is_inference() ? -1 : tensor._version(); }

}  // namespace memfit
