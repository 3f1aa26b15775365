// Draft trees as arguments and results of the loops, and other named tuples of arrays.
#pragma once
#include <array>

#include "node_column_indices.h"
#include "contiguous_arrays.h"

namespace draftree {

// Convert an entry of a tuple.
template <class T>
T entry(nanobind::handle tuple, Py_ssize_t i) {
  PyObject* found = PyTuple_Check(tuple.ptr()) ? PyTuple_GetItem(tuple.ptr(), i) : nullptr;
  T value;
  if (!found || !nanobind::try_cast(nanobind::handle(found), value)) {
    PyErr_Clear();
    throw nanobind::type_error(
        "an entry of a tuple does not have the expected type, dtype or number of dimensions");
  }
  return value;
}

// A tree as an argument. A column is converted only when it is read.
class NodeTable : public NodeColumns {
 public:
  NodeTable() = default;
  explicit NodeTable(nanobind::handle tuple) : tuple_(tuple) {}
  In<int64_t> integers(int column) const { return entry<In<int64_t>>(tuple_, column); }
  In<double> reals(int column) const { return entry<In<double>>(tuple_, column); }
  nanobind::handle tuple() const { return tuple_; }

 private:
  nanobind::handle tuple_;  // the caller holds it
};

// A new tree, whose columns have to be filled in.
class NewNodeTable {
 public:
  explicit NewNodeTable(int64_t count) {
    for (int i = 0; i < NodeTable::COUNT; i++) {
      if (NodeTable::is_real(i)) {
        reals_[i] = Out<double>::empty({count});
      } else {
        integers_[i] = Out<int64_t>::empty({count});
      }
    }
  }
  int64_t* integers(int column) { return integers_[column].data(); }
  double* reals(int column) { return reals_[column].data(); }

  // Return the columns as a tuple of the type of another tree.
  nanobind::object like(const NodeTable& other) const {
    nanobind::object columns = nanobind::steal(PyTuple_New(NodeTable::COUNT));
    for (int i = 0; i < NodeTable::COUNT; i++) {
      const nanobind::object& column =
          NodeTable::is_real(i) ? reals_[i].object() : integers_[i].object();
      PyTuple_SetItem(columns.ptr(), i, column.inc_ref().ptr());
    }
    static const auto make = reinterpret_cast<newfunc>(PyType_GetSlot(&PyTuple_Type, Py_tp_new));
    nanobind::object arguments = nanobind::steal(PyTuple_Pack(1, columns.ptr()));
    PyObject* made = make(Py_TYPE(other.tuple().ptr()), arguments.ptr(), nullptr);
    if (!made) throw nanobind::python_error();
    return nanobind::steal(made);
  }

 private:
  std::array<Out<int64_t>, NodeTable::COUNT> integers_;
  std::array<Out<double>, NodeTable::COUNT> reals_;
};

}  // namespace draftree

namespace nanobind::detail {

template <>
struct type_caster<draftree::NodeTable> {
  using NodeTable = draftree::NodeTable;
  NB_TYPE_CASTER(NodeTable, const_name("tuple"))
  bool from_python(handle source, uint8_t, cleanup_list*) noexcept {
    if (!PyTuple_Check(source.ptr()) || PyTuple_Size(source.ptr()) != NodeTable::COUNT)
      return false;
    value = NodeTable(source);
    return true;
  }
};

}  // namespace nanobind::detail
