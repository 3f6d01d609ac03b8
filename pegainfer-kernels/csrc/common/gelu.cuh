// What follows a sum with its bias: of the sum, and of what is there before.
#pragma once
#include "common/math.cuh"

struct Store {
    __device__ float operator()(float x, float) const { return x; }
};
struct AddTo {
    __device__ float operator()(float x, float before) const { return before + x; }
};
struct GeluTanh { // x/2 (1 + tanh u) = x sigmoid(2 u), u = sqrt(2/pi) (x + 0.044715 x³)
    __device__ float operator()(float x, float) const {
        return times_sigmoid(x, 1.595769f * fmaf(x * x * 0.044715f, x, x));
    }
};
struct GeluErf {
    __device__ float operator()(float x, float) const { return 0.5f * x * (1.f + erff(x * 0.70710678f)); }
};
