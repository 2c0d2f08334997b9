// The operators under autograd on CUDA, and entry points for Python that skip most of what a call from there costs.
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/object_ptr.h>
#include <torch/library.h>

#include <cmath>
#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>

#include "shape.h"

namespace {

using at::ScalarType;
using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using Maybe = std::optional<Tensor>;

template <typename Signature>
c10::TypedOperatorHandle<Signature> find(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

std::tuple<Tensor, Tensor> forward(const Tensor& x, const Tensor& shift, const Tensor& scale, double eps,
                                   std::optional<ScalarType> out_dtype, std::string_view impl) {
  static const auto op = find<decltype(forward)>("repro_adaln::layer_norm_modulate");
  return op.call(x, shift, scale, eps, out_dtype, impl);
}

std::tuple<Tensor, Tensor, Tensor> backward(const Tensor& dy, const Tensor& x, const Tensor& scale,
                                            const Tensor& statistics, ScalarType shift_dtype, std::string_view impl) {
  static const auto op = find<decltype(backward)>("repro_adaln::layer_norm_modulate_backward");
  return op.call(dy, x, scale, statistics, shift_dtype, impl);
}

std::tuple<Tensor, Tensor, Tensor> gated_forward(const Tensor& x, const Tensor& branch, const Maybe& gate,
                                                 const Tensor& shift, const Tensor& scale, double eps,
                                                 std::optional<ScalarType> out_dtype) {
  static const auto op = find<decltype(gated_forward)>("repro_adaln::gated_residual_layer_norm_modulate");
  return op.call(x, branch, gate, shift, scale, eps, out_dtype);
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gated_backward(const Tensor& dy, const Maybe& dh, const Tensor& h,
                                                                  const Maybe& branch, const Maybe& gate,
                                                                  const Tensor& scale, const Tensor& statistics,
                                                                  ScalarType shift_dtype) {
  static const auto op = find<decltype(gated_backward)>("repro_adaln::gated_residual_layer_norm_modulate_backward");
  return op.call(dy, dh, h, branch, gate, scale, statistics, shift_dtype);
}

// Whether gradients are wanted. A tangent is refused: passed by, it would be lost.
bool differentiated(std::initializer_list<const Tensor*> inputs) {
  const bool enabled = c10::GradMode::is_enabled();
  bool wanted = false;
  for (const Tensor* t : inputs) {
    if (!t->defined()) continue;
    TORCH_CHECK_NOT_IMPLEMENTED(!t->_fw_grad(/*level=*/0).defined(),
                                "layer_norm_modulate does not support forward-mode differentiation (jvp): use "
                                "repro.adaln.get_impl('eager')");
    wanted = wanted || (enabled && t->requires_grad());
  }
  return wanted;
}

const Tensor& or_undefined(const Maybe& t) {
  static const Tensor undefined;
  return t ? *t : undefined;
}

Maybe or_nothing(const Tensor& t) { return t.defined() ? Maybe(t) : Maybe(); }

// Code below runs under tracing too, where sizes may be symbols: it asks for none.
struct LayerNormModulate : torch::autograd::Function<LayerNormModulate> {
  static variable_list forward(AutogradContext* context, const Tensor& x, const Tensor& shift, const Tensor& scale,
                               double eps, std::optional<ScalarType> out_dtype, std::string_view impl) {
    at::AutoDispatchBelowADInplaceOrView guard;
    auto [y, statistics] = ::forward(x, shift, scale, eps, out_dtype, impl);
    context->set_materialize_grads(false);
    context->mark_non_differentiable({statistics});
    context->save_for_backward({x, scale, statistics});
    context->saved_data["shift_dtype"] = static_cast<int64_t>(shift.scalar_type());
    context->saved_data["impl"] = std::string(impl);
    return {std::move(y), std::move(statistics)};
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const Tensor& dy = gradients[0];
    if (!dy.defined()) return variable_list(6);
    const variable_list saved = context->get_saved_variables();
    auto [dx, dshift, dscale] = ::backward(dy, saved[0], saved[1], saved[2],
                                           static_cast<ScalarType>(context->saved_data["shift_dtype"].toInt()),
                                           context->saved_data["impl"].toStringView());
    // Left out, flat and empty, it is dy; autograd casts it to shift's dtype.
    if (dshift.dim() != dscale.dim()) dshift = dy;
    return {std::move(dx), std::move(dshift), std::move(dscale), Tensor(), Tensor(), Tensor()};
  }
};

struct GatedResidualLayerNormModulate : torch::autograd::Function<GatedResidualLayerNormModulate> {
  static variable_list forward(AutogradContext* context, const Tensor& x, const Tensor& branch, const Maybe& gate,
                               const Tensor& shift, const Tensor& scale, double eps,
                               std::optional<ScalarType> out_dtype) {
    at::AutoDispatchBelowADInplaceOrView guard;
    auto [h, y, statistics] = gated_forward(x, branch, gate, shift, scale, eps, out_dtype);
    context->set_materialize_grads(false);
    context->mark_non_differentiable({statistics});
    context->save_for_backward({h, gate ? branch : Tensor(), or_undefined(gate), scale, statistics});
    context->saved_data["shift_dtype"] = static_cast<int64_t>(shift.scalar_type());
    return {std::move(h), std::move(y), std::move(statistics)};
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const Tensor& dh = gradients[0];
    if (!dh.defined() && !gradients[1].defined()) return variable_list(7);
    const variable_list saved = context->get_saved_variables();
    const Tensor dy = gradients[1].defined() ? gradients[1] : at::zeros_like(saved[0]);
    auto [dx, dbranch, dgate, dshift, dscale] =
        gated_backward(dy, or_nothing(dh), saved[0], or_nothing(saved[1]), or_nothing(saved[2]), saved[3], saved[4],
                       static_cast<ScalarType>(context->saved_data["shift_dtype"].toInt()));
    // What was left out is held by another tensor; autograd casts it to its input's dtype.
    if (dshift.dim() != dscale.dim()) dshift = dy;
    const bool gated = saved[2].defined();
    return {dx, gated ? dbranch : dx, gated ? dgate : Tensor(), dshift, dscale, Tensor(), Tensor()};
  }
};

// Gives gradients a node of their own, so that asking for a gradient of them fails instead of finding nothing.
struct OnceDifferentiable : torch::autograd::Function<OnceDifferentiable> {
  static variable_list forward(AutogradContext*, at::TensorList, const variable_list* results) { return *results; }

  static variable_list backward(AutogradContext*, const variable_list&) {
    TORCH_CHECK(false,
                "layer_norm_modulate does not support double backward (a gradient of its gradient was asked for): use "
                "repro.adaln.get_impl('eager'), whose formula PyTorch differentiates any number of times");
  }
};

template <typename Results>
Results once_differentiable(Results results, std::initializer_list<const Tensor*> inputs) {
  if (!differentiated(inputs)) return results;
  variable_list given;
  for (const Tensor* t : inputs) {
    if (t->defined()) given.push_back(*t);
  }
  const at::TensorList list(given);
  std::apply(
      [&](auto&... t) {
        const variable_list plain{t...};
        size_t i = 0;
        const variable_list out = OnceDifferentiable::apply(list, &plain);
        ((t = out[i++]), ...);
      },
      results);
  return results;
}

std::tuple<Tensor, Tensor> forward_autograd(const Tensor& x, const Tensor& shift, const Tensor& scale, double eps,
                                            std::optional<ScalarType> out_dtype, std::string_view impl) {
  if (differentiated({&x, &shift, &scale})) {
    variable_list out = LayerNormModulate::apply(x, shift, scale, eps, out_dtype, impl);
    return {std::move(out[0]), std::move(out[1])};
  }
  at::AutoDispatchBelowADInplaceOrView guard;
  return forward(x, shift, scale, eps, out_dtype, impl);
}

std::tuple<Tensor, Tensor, Tensor> backward_autograd(const Tensor& dy, const Tensor& x, const Tensor& scale,
                                                     const Tensor& statistics, ScalarType shift_dtype,
                                                     std::string_view impl) {
  auto results = [&] {
    at::AutoDispatchBelowADInplaceOrView guard;
    return backward(dy, x, scale, statistics, shift_dtype, impl);
  }();
  return once_differentiable(std::move(results), {&dy, &x, &scale, &statistics});
}

std::tuple<Tensor, Tensor, Tensor> gated_forward_autograd(const Tensor& x, const Tensor& branch, const Maybe& gate,
                                                          const Tensor& shift, const Tensor& scale, double eps,
                                                          std::optional<ScalarType> out_dtype) {
  if (differentiated({&x, &branch, &or_undefined(gate), &shift, &scale})) {
    variable_list out = GatedResidualLayerNormModulate::apply(x, branch, gate, shift, scale, eps, out_dtype);
    return {std::move(out[0]), std::move(out[1]), std::move(out[2])};
  }
  at::AutoDispatchBelowADInplaceOrView guard;
  return gated_forward(x, branch, gate, shift, scale, eps, out_dtype);
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gated_backward_autograd(const Tensor& dy, const Maybe& dh,
                                                                           const Tensor& h, const Maybe& branch,
                                                                           const Maybe& gate, const Tensor& scale,
                                                                           const Tensor& statistics,
                                                                           ScalarType shift_dtype) {
  auto results = [&] {
    at::AutoDispatchBelowADInplaceOrView guard;
    return gated_backward(dy, dh, h, branch, gate, scale, statistics, shift_dtype);
  }();
  return once_differentiable(std::move(results),
                             {&dy, &or_undefined(dh), &h, &or_undefined(branch), &or_undefined(gate), &scale});
}

// Entry points for Python: positional arguments of the public functions. None for whatever needs more than plain CUDA
// tensors that fit: the caller then goes through torch.ops, or finds words for what is wrong.
bool is_plain(PyObject* object) { return THPVariable_CheckExact(object); }

bool fits(const Tensor& x, std::initializer_list<const Tensor*> like_x,
          std::initializer_list<const Tensor*> modulation) {
  const Tensor& first = **modulation.begin();
  if (!x.is_cuda() || !adaln::supported(x.scalar_type()) || !adaln::shape_of(x, first)) return false;
  const auto like = [&](const Tensor& t, const Tensor& other) {
    return t.sizes() == other.sizes() && t.device() == x.device() && adaln::supported(t.scalar_type());
  };
  for (const Tensor* t : like_x) {
    if (!like(*t, x)) return false;
  }
  for (const Tensor* t : modulation) {
    if (!like(*t, first)) return false;
  }
  return true;
}

// eps and out_dtype as Python gave them.
struct Options {
  bool fit;
  double eps;
  std::optional<ScalarType> out_dtype;

  Options(PyObject* eps_object, PyObject* dtype_object)
      : fit(PyFloat_CheckExact(eps_object) && (Py_IsNone(dtype_object) || THPDtype_Check(dtype_object))) {
    if (!fit) return;
    eps = PyFloat_AS_DOUBLE(eps_object);
    if (!Py_IsNone(dtype_object)) out_dtype = reinterpret_cast<THPDtype*>(dtype_object)->scalar_type;
    fit = eps > 0 && std::isfinite(eps) && (!out_dtype || adaln::supported(*out_dtype));
  }
};

// (x, shift, scale, eps, out_dtype, impl) -> y
PyObject* python_forward(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  if (count != 6 || at::impl::torch_function_mode_enabled() || !is_plain(args[0]) || !is_plain(args[1]) ||
      !is_plain(args[2]) || !PyUnicode_Check(args[5])) {
    Py_RETURN_NONE;
  }
  const Tensor &x = THPVariable_Unpack(args[0]), &shift = THPVariable_Unpack(args[1]),
               &scale = THPVariable_Unpack(args[2]);
  const Options options(args[3], args[4]);
  const bool dtile = PyUnicode_CompareWithASCIIString(args[5], "dtile") == 0;
  if (!options.fit || !fits(x, {}, {&scale, &shift}) ||
      !(dtile || PyUnicode_CompareWithASCIIString(args[5], "fused") == 0)) {
    Py_RETURN_NONE;
  }
  Tensor y;
  {
    pybind11::gil_scoped_release no_gil;
    y = std::get<0>(forward(x, shift, scale, options.eps, options.out_dtype, dtile ? "dtile" : "fused"));
  }
  return THPVariable_Wrap(std::move(y));
  END_HANDLE_TH_ERRORS
}

// (x, branch, gate, shift, scale, eps, out_dtype) -> (h, y)
PyObject* python_gated_forward(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  if (count != 7 || at::impl::torch_function_mode_enabled() || !is_plain(args[0]) || !is_plain(args[1]) ||
      !(Py_IsNone(args[2]) || is_plain(args[2])) || !is_plain(args[3]) || !is_plain(args[4])) {
    Py_RETURN_NONE;
  }
  const Tensor &x = THPVariable_Unpack(args[0]), &branch = THPVariable_Unpack(args[1]),
               &shift = THPVariable_Unpack(args[3]), &scale = THPVariable_Unpack(args[4]);
  const Maybe gate = Py_IsNone(args[2]) ? Maybe() : Maybe(THPVariable_Unpack(args[2]));
  const Options options(args[5], args[6]);
  if (!options.fit || !fits(x, {&branch}, {&scale, &shift, gate ? &*gate : &shift})) Py_RETURN_NONE;
  std::tuple<Tensor, Tensor, Tensor> out;
  {
    pybind11::gil_scoped_release no_gil;
    out = gated_forward(x, branch, gate, shift, scale, options.eps, options.out_dtype);
  }
  THPObjectPtr h(THPVariable_Wrap(std::get<0>(std::move(out))));
  THPObjectPtr y(THPVariable_Wrap(std::get<1>(std::move(out))));
  return h && y ? PyTuple_Pack(2, h.get(), y.get()) : nullptr;
  END_HANDLE_TH_ERRORS
}

template <typename Function>
PyCFunction as_method(Function* function) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(function));
}

}  // namespace

TORCH_LIBRARY_IMPL(repro_adaln, AutogradCUDA, m) {
  m.impl("layer_norm_modulate", &forward_autograd);
  m.impl("layer_norm_modulate_backward", &backward_autograd);
  m.impl("gated_residual_layer_norm_modulate", &gated_forward_autograd);
  m.impl("gated_residual_layer_norm_modulate_backward", &gated_backward_autograd);
}

PyMODINIT_FUNC PyInit_repro_adaln() {
  static PyMethodDef methods[] = {
      {"layer_norm_modulate", as_method(&python_forward), METH_FASTCALL, nullptr},
      {"gated_residual_layer_norm_modulate", as_method(&python_gated_forward), METH_FASTCALL, nullptr},
      {nullptr, nullptr, 0, nullptr}};
  static PyModuleDef module = {PyModuleDef_HEAD_INIT, "repro_adaln", nullptr, -1, methods};
  return PyModule_Create(&module);
}
