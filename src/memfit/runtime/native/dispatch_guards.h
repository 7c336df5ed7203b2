// Who of the dispatcher may act on what the engine itself calls.

#pragma once

#include <ATen/core/grad_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include "torch_names.h"

namespace memfit {

// A recipe holds a call as it was below autograd and autocast; neither may act on it again.
struct BelowAutogradAndAutocast {
  at::NoGradGuard no_grad;
  c10::impl::ExcludeDispatchKeyGuard no_autograd{c10::autograd_dispatch_keyset_with_ADInplaceOrView};
  c10::impl::ExcludeDispatchKeyGuard no_autocast{c10::autocast_dispatch_keyset};
  // Backward itself may run under a function transform, which what was recorded did not.
  c10::impl::ExcludeDispatchKeyGuard no_transforms{c10::DispatchKeySet(
      {c10::DispatchKey::VmapMode, c10::DispatchKey::FuncTorchVmapMode, c10::DispatchKey::FuncTorchBatched,
       c10::DispatchKey::FuncTorchDynamicLayerFrontMode, c10::DispatchKey::FuncTorchDynamicLayerBackMode})};
  c10::impl::ExcludeDispatchKeyGuard unheard{KEY};
};

// Whether a function transform of torch.func is at work here.
inline bool is_in_transform() {
  return c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerFrontMode);
}

// What torch itself takes away where no dispatch mode is to see what is run (`torch._C._DisableTorchDispatch`). Nor does
// the engine record it: an alias of a sparse tensor, for one, calls `aten.empty`.
struct UnseenByDispatchModes {
  c10::impl::ExcludeDispatchKeyGuard unseen{c10::DispatchKeySet(
      {c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot, c10::DispatchKey::PreDispatch})};
  c10::impl::ExcludeDispatchKeyGuard unrecorded{KEY};
};

}  // namespace memfit
