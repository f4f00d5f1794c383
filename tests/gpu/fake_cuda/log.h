// The one log of the libraries that stand in for CUDA. It is written where FAKE_CUDA_LOG says.
#pragma once

extern "C" void fake_cuda_log(const char * format, ...) __attribute__((format(printf, 1, 2)));
