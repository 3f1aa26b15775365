// The binding of all loops but those of retrieval to Python.
#pragma once
#include <nanobind/nanobind.h>

namespace draftree {
void bind_loops(nanobind::module_& m);

// Bind the loops of the file of the same name.
void bind_score_ranking(nanobind::module_& m);
void bind_tree_growth(nanobind::module_& m);
void bind_cost_curve(nanobind::module_& m);
void bind_node_selection(nanobind::module_& m);
void bind_acceptance_calibration(nanobind::module_& m);
void bind_pass_layout(nanobind::module_& m);
void bind_tree_verification(nanobind::module_& m);
void bind_cache_slots(nanobind::module_& m);
void bind_node_table(nanobind::module_& m);
void bind_merge_candidates(nanobind::module_& m);
void bind_hit_acceptance(nanobind::module_& m);
void bind_logistic_regression(nanobind::module_& m);
void bind_topk(nanobind::module_& m);
void bind_simd_loops(nanobind::module_& m);
}  // namespace draftree
