// The choice among the variants of the kernels, by the processor's instructions.
#pragma once
#include <string>
#include <vector>

#include "kernels.h"

namespace draftree {

// Return the variants that this processor can run, the fastest first.
std::vector<const Kernels*> supported_variants();

// Return the variant in use, by default the fastest.
const Kernels& variant_in_use();

// Use another variant; return false if this processor cannot run it.
bool use_variant(const std::string& name);

}  // namespace draftree
