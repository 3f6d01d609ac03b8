// The segments of a step of a gated delta rule layer: src/delta.rs.
//
// Segments that follow each other form a chain where each goes on from the slot that the one before it went to: the
// tokens of one sequence. Chains share nothing: no chain reads or writes a slot that another one writes.
#pragma once
#include "common/base.cuh"
#include "limits.h"

using namespace limits::segments;

struct Segment {
    uint32_t first, end; // tokens
    uint32_t from, to;   // slots or kNoState
};
static_assert(sizeof(Segment) == 4 * limits::segments::kWords);

// `segments`: [count, 4].
__device__ __forceinline__ Segment load_segment(const uint32_t *__restrict__ segments, uint32_t i) {
    uint4 words = __ldg(reinterpret_cast<const uint4 *>(segments) + i);
    return {words.x, words.y, words.z, words.w};
}

// Whether `segment` goes on from where the one before it ended.
__device__ __forceinline__ bool continues(const Segment &before, const Segment &segment) {
    return segment.from != kNoState && segment.from == before.to;
}

__device__ __forceinline__ bool begins_chain(const uint32_t *__restrict__ segments, uint32_t i) {
    return i == 0 || !continues(load_segment(segments, i - 1), load_segment(segments, i));
}

// Stops the kernel with an error unless segment i follows the one before it and has tokens and slots that there are.
__device__ __forceinline__ void check_segment(const uint32_t *__restrict__ segments, uint32_t i, uint32_t tokens,
                                              uint32_t slots) {
    Segment s = load_segment(segments, i);
    uint32_t begin = i == 0 ? 0 : load_segment(segments, i - 1).end;
    bool from = s.from < slots || s.from == kNoState, to = s.to < slots || s.to == kNoState;
    if (s.first != begin || s.end < s.first || s.end > tokens || !from || !to) __trap();
}

// The segment after the last one of the chain that segment i begins or belongs to.
__device__ __forceinline__ uint32_t chain_end(const uint32_t *__restrict__ segments, uint32_t count, uint32_t i) {
    Segment last = load_segment(segments, i);
    for (++i; i < count; ++i) {
        Segment next = load_segment(segments, i);
        if (!continues(last, next)) break;
        last = next;
    }
    return i;
}
