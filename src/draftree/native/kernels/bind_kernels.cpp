// The kernels as Python sees them. Tensors are given by the addresses of their first entries.
#include "bind_kernels.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <string>
#include <type_traits>
#include <vector>

#include "kernels.h"
#include "thread_team.h"
#include "variant_choice.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace draftree {

namespace {

using Address = uintptr_t;

template <class T = void>
T* pointer(Address address) {
  return reinterpret_cast<T*>(address);
}

// Ask the system for huge pages around a packed weight: it streams by faster, as fewer addresses
// are looked up.
void use_huge_pages([[maybe_unused]] Address from, [[maybe_unused]] int64_t bytes) {
#if defined(__linux__)
  constexpr Address PAGE = Address{2} << 20;
  const Address begin = from / PAGE * PAGE,
                end = (from + static_cast<Address>(bytes) + PAGE - 1) / PAGE * PAGE;
  // Only a hint: unmapped pages are skipped.
  madvise(pointer(begin), end - begin, MADV_HUGEPAGE);
#endif
}

template <class Structure, class Type>
auto address_property(nb::class_<Structure>& in, const char* name, Type Structure::* field) {
  in.def_prop_rw(
      name, [field](const Structure& it) { return reinterpret_cast<Address>(it.*field); },
      [field](Structure& it, Address value) {
        it.*field = pointer<std::remove_pointer_t<Type>>(value);
      });
}

template <class Structure, size_t N>
void stride_property(nb::class_<Structure>& in, const char* name, int64_t (Structure::*field)[N]) {
  in.def_prop_rw(
      name, [field](const Structure& it) { return std::vector<int64_t>(it.*field, it.*field + N); },
      [field](Structure& it, const std::vector<int64_t>& values) {
        if (values.size() != N) throw nb::value_error("the number of strides is wrong");
        for (size_t i = 0; i < N; i++) (it.*field)[i] = values[i];
      });
}

}  // namespace

void bind_kernels(nb::module_& m) {
  m.attr("FLOAT32") = static_cast<int>(FLOAT32);
  m.attr("BFLOAT16") = static_cast<int>(BFLOAT16);
  m.attr("FLOAT16") = static_cast<int>(FLOAT16);
  m.attr("INT4") = static_cast<int>(INT4);
  m.attr("INT8") = static_cast<int>(INT8);
  m.attr("PROJECT") = static_cast<int>(PROJECT);
  m.attr("FINISH") = static_cast<int>(FINISH);

  m.def(
      "variants",
      [] {
        std::vector<std::string> names;
        for (const Kernels* each : supported_variants()) names.emplace_back(each->name);
        return names;
      },
      "Return the variants that this processor can run, the fastest first.");
  m.def("variant", [] { return std::string(variant_in_use().name); }, "Return the variant in use.");
  m.def(
      "use_variant",
      [](const std::string& name) {
        if (!use_variant(name)) throw nb::value_error("this processor cannot run that variant");
      },
      "name"_a, "Use a variant. Weights that were packed before are in the layout of another one.");
  m.def(
      "use_openmp",
      [](Address fork, Address number, Address count) {
        use_openmp(pointer(fork), pointer(number), pointer(count));
      },
      "fork"_a, "thread_number"_a, "thread_count"_a,
      "Use the threads of an OpenMP runtime, by the addresses of its functions; 0 for threads of "
      "our own.");

  nb::class_<Linear> linear(m, "Linear",
                            "A linear layer by the addresses of its packed weight and its bias.");
  linear.def(
      "__init__",
      [](Linear* self, Address weight, Address bias, int64_t inputs, int64_t outputs,
         int32_t type) {
        new (self) Linear{pointer(weight), pointer(bias), inputs, outputs, type};
      },
      "weight"_a, "bias"_a, "inputs"_a, "outputs"_a, "type"_a);
  address_property(linear, "weight", &Linear::weight);
  address_property(linear, "bias", &Linear::bias);
  linear.def_ro("inputs", &Linear::inputs)
      .def_ro("outputs", &Linear::outputs)
      .def_ro("type", &Linear::type);

  nb::class_<Norm> norm(m, "Norm", "RMSNorm by the address of its weight, 0 for none.");
  norm.def(
      "__init__",
      [](Norm* self, Address weight, float epsilon) { new (self) Norm{pointer(weight), epsilon}; },
      "weight"_a = 0, "epsilon"_a = 0.0f);
  address_property(norm, "weight", &Norm::weight);
  norm.def_rw("epsilon", &Norm::epsilon);

  nb::class_<Layer>(m, "Layer", "One decoder layer of the Llama kind.")
      .def(
          "__init__",
          [](Layer* self, const Norm& input_norm, const Norm& feature_norm, const Linear& qkv,
             const Norm& q_norm, const Norm& k_norm, const Linear& o_proj, const Norm& post_norm,
             const Linear& gate_up, const Linear& down) {
            new (self) Layer{input_norm, feature_norm, qkv,     q_norm, k_norm,
                             o_proj,     post_norm,    gate_up, down};
          },
          "input_norm"_a, "feature_norm"_a, "qkv"_a, "q_norm"_a, "k_norm"_a, "o_proj"_a,
          "post_norm"_a, "gate_up"_a, "down"_a)
      .def_rw("input_norm", &Layer::input_norm)
      .def_rw("feature_norm", &Layer::feature_norm)
      .def_rw("qkv", &Layer::qkv)
      .def_rw("q_norm", &Layer::q_norm)
      .def_rw("k_norm", &Layer::k_norm)
      .def_rw("o_proj", &Layer::o_proj)
      .def_rw("post_norm", &Layer::post_norm)
      .def_rw("gate_up", &Layer::gate_up)
      .def_rw("down", &Layer::down);

  nb::class_<Shape>(m, "Shape", "What all layers of a pass have in common.")
      .def(
          "__init__",
          [](Shape* self, int64_t hidden, int64_t intermediate, int64_t groups, int64_t heads,
             int64_t head_dim, int32_t dtype, float scale) {
            new (self) Shape{hidden, intermediate, groups, heads, head_dim, dtype, scale};
          },
          "hidden"_a, "intermediate"_a, "groups"_a, "heads"_a, "head_dim"_a, "dtype"_a, "scale"_a)
      .def_rw("scale", &Shape::scale);

  nb::class_<Pass> pass(m, "Pass", "A pass over some tokens; see kernels.h for its fields.");
  pass.def(nb::init<>())
      .def_rw("shape", &Pass::shape)
      .def_rw("parts", &Pass::parts)
      .def_rw("sequences", &Pass::sequences)
      .def_rw("tokens", &Pass::tokens)
      .def_rw("key_layer", &Pass::key_layer)
      .def_rw("value_layer", &Pass::value_layer)
      .def_rw("slots", &Pass::slots)
      .def_rw("hidden_below", &Pass::hidden_below)
      .def_rw("selected_count", &Pass::selected_count)
      .def_rw("final_norm", &Pass::final_norm)
      .def_rw("head", &Pass::head);
  address_property(pass, "table", &Pass::table);
  address_property(pass, "input", &Pass::input);
  address_property(pass, "features", &Pass::features);
  address_property(pass, "residual", &Pass::residual);
  address_property(pass, "cosines", &Pass::cosines);
  address_property(pass, "sines", &Pass::sines);
  address_property(pass, "positions", &Pass::positions);
  address_property(pass, "depths", &Pass::depths);
  address_property(pass, "starts", &Pass::starts);
  address_property(pass, "keys", &Pass::keys);
  address_property(pass, "values", &Pass::values);
  address_property(pass, "mask", &Pass::mask);
  address_property(pass, "final_states", &Pass::final_states);
  address_property(pass, "logits", &Pass::logits);
  address_property(pass, "selected", &Pass::selected);
  stride_property(pass, "key_strides", &Pass::key_strides);
  stride_property(pass, "value_strides", &Pass::value_strides);
  stride_property(pass, "mask_strides", &Pass::mask_strides);

  nb::class_<Attention> attention(m, "Attention", "Attention alone; see kernels.h for its fields.");
  attention.def(nb::init<>())
      .def_rw("sequences", &Attention::sequences)
      .def_rw("groups", &Attention::groups)
      .def_rw("heads", &Attention::heads)
      .def_rw("tokens", &Attention::tokens)
      .def_rw("slots", &Attention::slots)
      .def_rw("key_dim", &Attention::key_dim)
      .def_rw("value_dim", &Attention::value_dim)
      .def_rw("dtype", &Attention::dtype)
      .def_rw("mask_dtype", &Attention::mask_dtype)
      .def_rw("scale", &Attention::scale)
      .def_rw("cap", &Attention::cap)
      .def_rw("hidden_below", &Attention::hidden_below);
  address_property(attention, "queries", &Attention::queries);
  address_property(attention, "keys", &Attention::keys);
  address_property(attention, "values", &Attention::values);
  address_property(attention, "mask", &Attention::mask);
  address_property(attention, "sinks", &Attention::sinks);
  address_property(attention, "outputs", &Attention::outputs);
  stride_property(attention, "query_strides", &Attention::query_strides);
  stride_property(attention, "key_strides", &Attention::key_strides);
  stride_property(attention, "value_strides", &Attention::value_strides);
  stride_property(attention, "mask_strides", &Attention::mask_strides);

  m.def(
      "packed_bytes",
      [](int32_t type, int64_t outputs, int64_t inputs) {
        return variant_in_use().packed_bytes(type, outputs, inputs);
      },
      "type"_a, "outputs"_a, "inputs"_a, "Return the bytes of a packed weight.");
  m.def(
      "pack",
      [](int32_t type, Address weight, int64_t outputs, int64_t inputs, Address packed,
         int threads) {
        nb::gil_scoped_release release;
        use_huge_pages(packed, variant_in_use().packed_bytes(type, outputs, inputs));
        variant_in_use().pack(type, pointer(weight), outputs, inputs, pointer(packed), threads);
      },
      "type"_a, "weight"_a, "outputs"_a, "inputs"_a, "packed"_a, "threads"_a,
      "Pack a weight [outputs, inputs].");
  m.def(
      "pack_int4",
      [](Address numbers, Address scales, int64_t outputs, int64_t inputs, Address packed,
         int threads) {
        nb::gil_scoped_release release;
        use_huge_pages(packed, variant_in_use().packed_bytes(INT4, outputs, inputs));
        variant_in_use().pack_int4(pointer<uint8_t>(numbers), pointer<uint16_t>(scales), outputs,
                                   inputs, pointer(packed), threads);
      },
      "numbers"_a, "scales"_a, "outputs"_a, "inputs"_a, "packed"_a, "threads"_a,
      "Pack numbers 0 to 15 with their steps and middles.");
  m.def(
      "pack_int8",
      [](int32_t type, Address weight, int64_t outputs, int64_t inputs, Address packed,
         int threads) {
        nb::gil_scoped_release release;
        use_huge_pages(packed, variant_in_use().packed_bytes(INT8, outputs, inputs));
        variant_in_use().pack_int8(type, pointer(weight), outputs, inputs, pointer(packed),
                                   threads);
      },
      "type"_a, "weight"_a, "outputs"_a, "inputs"_a, "packed"_a, "threads"_a,
      "Round a weight to eight bits and pack it.");
  m.def(
      "linear",
      [](const Linear& layer, int32_t dtype, Address input, int64_t tokens, Address output,
         int threads) {
        nb::gil_scoped_release release;
        variant_in_use().linear(layer, dtype, pointer(input), tokens, pointer(output), threads);
      },
      "layer"_a, "dtype"_a, "input"_a, "tokens"_a, "output"_a, "threads"_a,
      "Compute a linear layer.");
  m.def(
      "forward",
      [](Pass& pass, const std::vector<const Layer*>& layers, const std::vector<Address>& outputs,
         int threads) {
        pass.layers = layers.data();
        pass.outputs = reinterpret_cast<void* const*>(outputs.data());
        pass.count = static_cast<int64_t>(layers.size());
        nb::gil_scoped_release release;
        variant_in_use().forward(pass, threads);
      },
      "pass_"_a, "layers"_a, "outputs"_a, "threads"_a,
      "Compute layers one after the other; an output of 0 is not kept.");
  m.def(
      "attend",
      [](const Attention& attention, int threads) {
        nb::gil_scoped_release release;
        variant_in_use().attend(attention, threads);
      },
      "attention"_a, "threads"_a, "Compute attention.");
  m.def(
      "rms_norm",
      [](int32_t dtype, Address input, Address weight, Address output, int64_t rows, int64_t width,
         float epsilon) {
        variant_in_use().rms_norm(dtype, pointer(input), pointer(weight), pointer(output), rows,
                                  width, epsilon);
      },
      "dtype"_a, "input"_a, "weight"_a, "output"_a, "rows"_a, "width"_a, "epsilon"_a,
      "Compute RMSNorm of rows [rows, width].");
  m.def(
      "rotate",
      [](int32_t dtype, Address input, Address cosines, Address sines, Address output, int64_t rows,
         int64_t heads, int64_t width) {
        variant_in_use().rotate(dtype, pointer(input), pointer(cosines), pointer(sines),
                                pointer(output), rows, heads, width);
      },
      "dtype"_a, "input"_a, "cosines"_a, "sines"_a, "output"_a, "rows"_a, "heads"_a, "width"_a,
      "Rotate halves of heads [rows, heads, width].");
  m.def(
      "swiglu",
      [](int32_t dtype, Address gate, Address up, Address output, int64_t count) {
        variant_in_use().swiglu(dtype, pointer(gate), pointer(up), pointer(output), count);
      },
      "dtype"_a, "gate"_a, "up"_a, "output"_a, "count"_a, "Multiply silu(gate) by up.");
}

}  // namespace draftree
