// Guards around the ops that the engine itself calls: which dispatch keys may act on them.

#pragma once

#include <ATen/core/grad_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include "torch_names.h"

namespace memfit {

// A record holds a call as it was below autograd and autocast. Neither may act on it a second time.
struct BelowAutogradAndAutocast {
  at::NoGradGuard no_grad;
  c10::impl::ExcludeDispatchKeyGuard no_autograd{c10::autograd_dispatch_keyset_with_ADInplaceOrView};
  c10::impl::ExcludeDispatchKeyGuard no_autocast{c10::autocast_dispatch_keyset};
  // The backward pass may run under a function transform; the recorded call did not.
  c10::impl::ExcludeDispatchKeyGuard no_transforms{c10::DispatchKeySet(
      {c10::DispatchKey::VmapMode, c10::DispatchKey::FuncTorchVmapMode, c10::DispatchKey::FuncTorchBatched,
       c10::DispatchKey::FuncTorchDynamicLayerFrontMode, c10::DispatchKey::FuncTorchDynamicLayerBackMode})};
  c10::impl::ExcludeDispatchKeyGuard unheard{KEY};
};

// Hides ops from all dispatch modes, as `torch._C._DisableTorchDispatch` does, and from the engine: an alias of a
// sparse tensor calls `aten.empty`, which the model did not.
struct UnseenByDispatchModes {
  c10::impl::ExcludeDispatchKeyGuard unseen{c10::DispatchKeySet(
      {c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot, c10::DispatchKey::PreDispatch})};
  c10::impl::ExcludeDispatchKeyGuard unrecorded{KEY};
};

}  // namespace memfit
