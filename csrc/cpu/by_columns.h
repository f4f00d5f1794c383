// From a number of columns at run time to a function compiled for it.
#pragma once

#include "kernels.h"

namespace tern::TERN_ISA {

namespace {  // on purpose: one copy for each instruction set

// One column alone (decode), as the instruction set has it.
template <int GROUP>
void multiply_column(const uint8_t * tiles, int64_t n_rows, const ColumnLayout & layout, const uint8_t * column,
                     float * output);

// multiply_column(), or PanelKernel<GROUP, COLS>::multiply(tiles, n_rows, layout, panel, outputs) for the COLS, 2 to MOST, that
// is n_cols.
template <template <int, int> class PanelKernel, int GROUP, int MOST>
void multiply_by_columns(const uint8_t * tiles, int64_t n_rows, const ColumnLayout & layout, const uint8_t * panel,
                         int n_cols, float * const * outputs) {
    if constexpr (MOST == 1) {
        multiply_column<GROUP>(tiles, n_rows, layout, panel, outputs[0]);
    } else if (n_cols < MOST) {
        multiply_by_columns<PanelKernel, GROUP, MOST - 1>(tiles, n_rows, layout, panel, n_cols, outputs);
    } else {
        PanelKernel<GROUP, MOST>::multiply(tiles, n_rows, layout, panel, outputs);
    }
}

// Kernels::multiply of PanelKernel that take up to MOST columns.
template <template <int, int> class PanelKernel, int MOST>
void multiply_any(const uint8_t * tiles, int64_t n_rows, int group, const ColumnLayout & layout, const uint8_t * panel,
                  int n_cols, float * const * outputs) {
    if (group == 64) {
        multiply_by_columns<PanelKernel, 64, MOST>(tiles, n_rows, layout, panel, n_cols, outputs);
    } else {
        multiply_by_columns<PanelKernel, 128, MOST>(tiles, n_rows, layout, panel, n_cols, outputs);
    }
}

// The scales and the sums of a panel of COLS columns.
template <int GROUP, int COLS> struct PanelView {
    const uint8_t * q;
    const float * scales;
    const int16_t * minus_sums;

    PanelView(const ColumnLayout & layout, const uint8_t * panel)
        : q(panel), scales(reinterpret_cast<const float *>(panel + layout.scales * COLS)),
          minus_sums(reinterpret_cast<const int16_t *>(panel + layout.sums * COLS)) {}

    // Of the group of weights that begins at input `begin`.
    float scale(int64_t begin, int c) const { return scales[begin / ACTIVATION_GROUP * COLS + c]; }
    int32_t minus_sum(int64_t begin, int c) const {
        const int16_t * both = halves(begin, c);
        return GROUP == ACTIVATION_GROUP ? both[0] + both[1] : both[begin / ACTIVATION_SUM_GROUP % 2];
    }
    // Minus the sums of the half groups of the activation group that it is in.
    const int16_t * halves(int64_t begin, int c) const {
        return minus_sums + (begin / ACTIVATION_GROUP * COLS + c) * 2;
    }
};

}  // namespace

}  // namespace tern::TERN_ISA
