// Whether a GPU computes what it should.
//
// Hardware and drivers that nobody here has seen will run this, and a wrong product is fluent nonsense. So when llama.cpp first asks
// whether a matrix of ours may live on a device, the device multiplies: a small matrix of that type, by 1, 8 and 64 columns, rotated in
// each way that a model opened so far is, through the very path that the model will take. A device whose results differ from the plain
// ones is left alone. TERN_GPU_SELF_TEST=0 takes the devices at their word.
#pragma once

#include "grafted_device.h"

namespace tern {

// Whether the device passed what there is to be tested for an operation (a MUL_MAT, MUL_MAT_ID or GET_ROWS of a ternary matrix). Tests what
// was not tested yet, and says on stderr when it fails. Safe from any thread.
bool passes_self_test(GraftedDevice & device, const ggml_tensor * op);

// Tests a product with PQ2_0, and one that is rotated in blocks of 1024 as released models are, for those who have no model at hand.
void test_products(GraftedDevice & device);

}  // namespace tern
