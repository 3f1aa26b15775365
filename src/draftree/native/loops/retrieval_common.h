// What the retrieval loops share, and the functions that bind them.
#pragma once
#include <nanobind/nanobind.h>

#include <cstdint>
#include <cstring>

#include "strided_arrays.h"

namespace draftree {

void bind_suffix_match_drafts(nb::module_& m);
void bind_suffix_node_expansion(nb::module_& m);
void bind_suffix_array(nb::module_& m);
void bind_continuation_trie(nb::module_& m);
void bind_ngrams(nb::module_& m);
void bind_mcts(nb::module_& m);
void bind_chains(nb::module_& m);

// One-dimensional whole numbers of any width, as they stand in a file: perhaps not aligned, never
// strided.
struct WholeNumbers {
  const unsigned char* data = nullptr;
  int64_t count = 0;
  int width = 0;  // bytes; negative for signed numbers

  template <class T>
  T load(int64_t i) const {
    T value;
    std::memcpy(&value, data + i * static_cast<int64_t>(sizeof(T)), sizeof(T));
    return value;
  }

  // Call a function with a reader of the entries: one instance of it for each width.
  template <class Function>
  auto visit(Function&& function) const {
    switch (width) {
      case 1:
        return function([this](int64_t i) { return static_cast<int64_t>(load<uint8_t>(i)); });
      case 2:
        return function([this](int64_t i) { return static_cast<int64_t>(load<uint16_t>(i)); });
      case 4:
        return function([this](int64_t i) { return static_cast<int64_t>(load<uint32_t>(i)); });
      case -1:
        return function([this](int64_t i) { return static_cast<int64_t>(load<int8_t>(i)); });
      case -2:
        return function([this](int64_t i) { return static_cast<int64_t>(load<int16_t>(i)); });
      case -4:
        return function([this](int64_t i) { return static_cast<int64_t>(load<int32_t>(i)); });
      default:
        return function([this](int64_t i) { return load<int64_t>(i); });
    }
  }

  int64_t operator()(int64_t i) const {
    return visit([i](auto read) { return read(i); });
  }
};

// Return an array whose entries are read one after the other, without strides.
template <class T, int N>
const Array<T, N>& contiguous(const Array<T, N>& array) {
  int64_t step = 1;
  for (int d = N - 1; d >= 0; d--) {
    if (array.size() > 1 && array.shape[d] > 1 && array.stride[d] != step)
      throw nb::type_error("an array is not C-contiguous");
    step *= array.shape[d];
  }
  return array;
}

bool read_array(PyObject* object, WholeNumbers& into) noexcept;
WholeNumbers whole_numbers_field(nb::handle tuple, Py_ssize_t i);

// The last tokens up to a tree's node, written to the end of `found` [longest]; returns how many
// there are.
int64_t write_context(const Ints& text, int64_t text_length, const Ints& tokens,
                      const Ints& parents, int64_t node, int64_t longest, int64_t* found);

}  // namespace draftree

NAMESPACE_BEGIN(NB_NAMESPACE)
NAMESPACE_BEGIN(detail)
template <>
struct type_caster<draftree::WholeNumbers> : array_caster<draftree::WholeNumbers> {};
NAMESPACE_END(detail)
NAMESPACE_END(NB_NAMESPACE)
