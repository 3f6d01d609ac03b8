// The names that TileLang's generated code takes for granted.
#pragma once
#include <cstdint>
#include <cuda_bf16.h>

using bfloat16_t = __nv_bfloat16;
using uint = unsigned int;
