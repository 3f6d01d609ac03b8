// Fragments: which elements of a tile each lane of a warp holds for the tensor cores, and the instructions on them.
//
// PTX ISA, "Matrix fragments for mma.m16n8k16", with lane = 4 group + quad:
//   accumulator [16, 8] f32    Frag<16, 8>: rows group and group + 8 at columns 2 quad and 2 quad + 1
//   operand A [16, 16] bf16    uint4: pairs of rows group, group + 8 at columns 2 quad, 2 quad + 1; the same 8 columns
//   on operand B [16, 8] bf16     two pairs: column group at rows 2 quad, 2 quad + 1; the same 8 rows on
// Two accumulators of neighbouring columns are an operand A in place (`operand_a`), which chains GEMMs without
// shuffles. A warpgroup's wgmma gives warp w rows 16 w to 16 w + 15 as accumulators, one for each 8 columns.
#pragma once
#include "common/base.cuh"

template <int M, int N> struct Frag;

// Element i of a lane is at row(lane, i), column(lane, i) of the tile: 0 and 1 in the upper row, 2 and 3 in the lower
// one.
template <> struct Frag<16, 8> {
    float x[4];
    __device__ __forceinline__ float &operator[](int i) { return x[i]; }
    __device__ __forceinline__ const float &operator[](int i) const { return x[i]; }
    static __device__ __forceinline__ uint32_t row(uint32_t lane, int i) { return lane / 4 + i / 2 * 8; }
    static __device__ __forceinline__ uint32_t column(uint32_t lane, int i) { return lane % 4 * 2 + i % 2; }
};
using Accumulator = Frag<16, 8>;

// d += a b: m16n8k16, bf16 operands, f32 sums.
__device__ __forceinline__ void mma(Accumulator &d, const uint4 &a, uint32_t b0, uint32_t b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
}

// The same of f16 operands.
__device__ __forceinline__ void mma_f16(Accumulator &d, const uint4 &a, uint32_t b0, uint32_t b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
}

// 32 columns of the sum at once, from vectors: each lane holds 8 neighbouring columns of rows group (`low`) and group +
// 8 (`high`) of A, and of column group of B. The columns enter in another order than the instruction's, the same for
// both operands, which the sum over them does not see.
__device__ __forceinline__ void mma32(Accumulator &d, uint4 low, uint4 high, uint4 b) {
    mma(d, make_uint4(low.x, high.x, low.y, high.y), b.x, b.y);
    mma(d, make_uint4(low.z, high.z, low.w, high.w), b.z, b.w);
}

// Accumulators of two neighbouring tiles, 16 columns, as operand A.
__device__ __forceinline__ uint4 operand_a(const Accumulator &low, const Accumulator &high) {
    return make_uint4(narrow(low[0], low[1]), narrow(low[2], low[3]), narrow(high[0], high[1]),
                      narrow(high[2], high[3]));
}

__device__ __forceinline__ uint32_t shared_address(const void *at) { return uint32_t(__cvta_generic_to_shared(at)); }

// ldmatrix: four 8 x 8 matrices of bf16, one a register; lane 8 i + r gives the address of row r of matrix i, a vector.
// A lane gets row group at columns 2 quad, 2 quad + 1; transposed, rows 2 quad, 2 quad + 1 at column group.
template <bool Transposed = false> __device__ __forceinline__ uint4 load_matrices(uint32_t row) {
    uint4 v;
    if (Transposed)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                     : "r"(row)
                     : "memory");
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                     : "r"(row)
                     : "memory");
    return v;
}
template <bool Transposed = false> __device__ __forceinline__ uint4 load_matrices(const void *row) {
    return load_matrices<Transposed>(shared_address(row));
}

// An 8 x 8 matrix in registers, transposed: from row group at columns 2 quad, 2 quad + 1 to column group at those rows.
__device__ __forceinline__ uint32_t transposed(uint32_t pair) {
    uint32_t out;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(pair));
    return out;
}

#if __CUDA_ARCH__ >= 900
// stmatrix: four 8 x 8 matrices of bf16, laid out as operand A, to shared memory: lane 8 i + r says where row r of
// matrix i goes.
__device__ __forceinline__ void store_matrices(uint32_t to, const uint32_t (&pairs)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(pairs[0]),
                 "r"(pairs[1]), "r"(pairs[2]), "r"(pairs[3])
                 : "memory");
}

// Stores 8 x 8 matrices transposed (stmatrix .trans): lane 8 i + c has the address of column c of matrix i, which is
// stored as a vector. Of two matrices, lanes 0 to 15 have the addresses.
__device__ __forceinline__ void store_columns(uint32_t to, const uint32_t (&pairs)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(pairs[0]),
                 "r"(pairs[1]), "r"(pairs[2]), "r"(pairs[3])
                 : "memory");
}
__device__ __forceinline__ void store_columns(uint32_t to, const uint32_t (&pairs)[2]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(to), "r"(pairs[0]),
                 "r"(pairs[1])
                 : "memory");
}
#endif
