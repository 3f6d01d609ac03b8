//! Low-rank adapters (LoRA, Hu et al. 2021): each row of a step may add the output of two thin GEMMs to that of
//! a projection.
//!
//! A GPU or CPU holds the matrices of several adapters at once, each in a slot. A projection that stacks `s` matrices of
//! the checkpoint, such as queries, keys and values, has `s` segments: the input is multiplied by the `A` of all segments,
//! each segment's part of that by its `B`, and the result is added to the segment's columns of the output. Rows of
//! different adapters, and rows without one, share a call.

use super::check::Check;
use crate::cpu::linear::{LinearOut, linear};
use crate::cpu::lora as reference;
use crate::cuda;
use half::bf16;
use pegainfer_core::exec::{Device, Exec};
use pegainfer_core::record::OpRecord;
use pegainfer_core::tensor::{DType, OpError, Tensor};

pub use crate::adapter_matrices::AdapterMatrices;
pub use pegainfer_core::schedule::NO_ADAPTER;

/// Most matrices that a projection stacks.
pub const MAX_SEGMENTS: usize = crate::limits::lora::MAX_SEGMENTS;

/// Ranks of a slot are a multiple of this, so that kernels can read vectors.
pub const RANK_MULTIPLE: usize = 8;

/// `out[i, c] += Σ_j t[j] * b[slots[i], c, j]` with `t = x[i] · a[slots[i], s * rank ..][.. rank]ᵀ`, for each column `c` of
/// segment `s` and each row with an adapter; other rows of `out`, and columns after the last segment, keep their values.
///
/// `x`: `[rows, k]` bf16; `slots`: `[rows]` u32, numbers of adapters or [`NO_ADAPTER`]; `out`: `[rows, width]` bf16, the
/// output of the GEMM with the base weight. Both sums are f32 and not rounded (on a GPU, `t` to 16 bits); the second is
/// added to `out` before the one rounding of the result, as PEFT does in bf16. A row's result does not depend on the other
/// rows. On a GPU `k`, the rank and `width` are multiples of [`RANK_MULTIPLE`].
pub fn add_adapters(
    exec: &mut Exec,
    x: &Tensor,
    matrices: &AdapterMatrices,
    slots: &Tensor,
    out: &mut Tensor,
) -> Result<(), OpError> {
    let AdapterMatrices { a, b, segments } = matrices;
    let check = Check("lora");
    let ((m, k), (adapters, _), (_, width)) = (x.rows_cols(), b.rows_cols(), out.rows_cols());
    let (rank, columns) = (b.shape().last().copied().unwrap_or(0), segments.iter().sum::<usize>());
    check.that((1..=MAX_SEGMENTS).contains(&segments.len()), "the projection has no segment, or too many")?;
    check.that(columns <= width, "out has fewer columns than the segments")?;
    let n = segments.len() * rank;
    check.is(x, DType::Bf16, &[m, k])?;
    check.is(a, DType::Bf16, &[adapters, n, k])?;
    check.is(b, DType::Bf16, &[adapters, width, rank])?;
    check.is(slots, DType::U32, &[m])?;
    check.is(out, DType::Bf16, &[m, width])?;
    exec.record(|device| {
        // At most one adapter a row is read.
        let read = (a.bytes() + b.bytes()) / adapters.max(1) as u64 * adapters.min(m) as u64;
        let bytes = x.bytes() + slots.bytes() + read + 2 * out.bytes();
        let kernel = if let Device::Cpu(isa) = device { isa.name() } else { "adapters" };
        let flops = 2 * m * (n * k + columns * rank);
        OpRecord::new("lora", kernel, &[x, a, b, slots, out], &[out], flops as u64).with_bytes(bytes)
    });
    match exec.device() {
        Device::Cpu(isa) => {
            for (slot, rows) in runs(slots.host()) {
                let mut shrunk = vec![0.0; rows.len() * n];
                let (x, a) = (&x.host::<bf16>()[rows.start * k..rows.end * k], &a.host()[slot * n * k..][..n * k]);
                linear(isa, x, a, rows.len(), n, k, LinearOut::F32(&mut shrunk), &mut exec.scratch);
                let b = &b.host()[slot * width * rank..][..width * rank];
                let out = &mut out.host_mut()[rows.start * width..rows.end * width];
                reference::expand((&shrunk, rank), b, segments, out, width);
            }
            Ok(())
        }
        Device::Cuda => cuda::add_adapters(exec, x, matrices, slots, out),
        Device::Meta => Ok(()),
    }
}

/// Slots of `rows` rows as the reference kernels take them: ranges of neighbouring rows with one slot, in order.
fn runs(slots: &[u32]) -> impl Iterator<Item = (usize, std::ops::Range<usize>)> {
    let mut first = 0;
    slots.chunk_by(|a, b| a == b).filter_map(move |run| {
        let rows = first..first + run.len();
        first = rows.end;
        (run[0] != NO_ADAPTER).then_some((run[0] as usize, rows))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::linear;
    use crate::testing::{Host, bf16s, close};
    use half::bf16;
    use pegainfer_core::tensor::DType;

    const RANK: usize = 5;
    const SLOTS: usize = 3;
    const SEGMENTS: [usize; 3] = [24, 8, 9];

    /// Small factors, so that sums stay near 1.
    fn factors(n: usize, seed: u64) -> Vec<bf16> {
        bf16s(n, seed).into_iter().map(|v| bf16::from_f32(v.to_f32() / 8.0)).collect()
    }

    /// The rows after the segments have no adapter, as the zeros that pad a projection.
    #[test]
    fn a_row_gets_the_delta_of_its_own_adapter() {
        let (k, width) = (40, SEGMENTS.iter().sum::<usize>() + 7);
        Host::each(|mut host| {
            for slots in [vec![2], vec![0, 0, NO_ADAPTER, 1, 0, 2, 2, NO_ADAPTER], vec![1; 40]] {
                let m = slots.len();
                let (x, y) = (bf16s(m * k, 1), bf16s(m * width, 2));
                let (a, b) = (factors(SLOTS * 3 * RANK * k, 3), factors(SLOTS * width * RANK, 4));
                let (tx, ts) = (host.bf16("x", &[m, k], &x), host.u32("slots", &slots));
                let (ta, tb) = (host.bf16("a", &[SLOTS, 3 * RANK, k], &a), host.bf16("b", &[SLOTS, width, RANK], &b));
                let matrices = AdapterMatrices { a: ta, b: tb, segments: SEGMENTS.to_vec() };
                let mut out = host.bf16("out", &[m, width], &y);
                add_adapters(&mut host.exec, &tx, &matrices, &ts, &mut out).unwrap();
                let delta = |row: usize, column: usize| {
                    let (slot, mut first) = (slots[row] as usize, 0);
                    let segment = SEGMENTS.iter().position(|n| {
                        first += n;
                        column < first
                    })?;
                    let entry = |j: usize| -> f64 {
                        let a = &a[(slot * 3 * RANK + segment * RANK + j) * k..][..k];
                        let dot: f64 = a.iter().zip(&x[row * k..]).map(|(a, x)| a.to_f64() * x.to_f64()).sum();
                        b[(slot * width + column) * RANK + j].to_f64() * dot
                    };
                    Some((0..RANK).map(entry).sum::<f64>())
                };
                let expected: Vec<f64> = (0..m * width)
                    .map(|i| {
                        let added = (slots[i / width] != NO_ADAPTER).then(|| delta(i / width, i % width)).flatten();
                        y[i].to_f64() + added.unwrap_or(0.0)
                    })
                    .collect();
                close(out.host::<bf16>(), &expected, 1.01 / 256.0, 1e-4);
                for row in (0..m).filter(|row| slots[*row] == NO_ADAPTER) {
                    assert_eq!(out.host::<bf16>()[row * width..][..width], y[row * width..][..width]);
                }
            }
        });
    }

    /// `x · (w + b · a)ᵀ`, where the sum of the weights is exact in bf16.
    #[test]
    fn it_equals_a_weight_that_the_adapter_was_merged_into() {
        let (m, n, k) = (3, 17, 24);
        Host::each(|mut host| {
            let whole = |n: usize, seed: u64| -> Vec<bf16> {
                bf16s(n, seed).into_iter().map(|v| bf16::from_f32(v.to_f32().round())).collect()
            };
            let (x, w, a, b) = (bf16s(m * k, 1), whole(n * k, 2), whole(2 * k, 3), whole(n * 2, 4));
            let merged = (0..n * k).map(|i| {
                let (row, column) = (i / k, i % k);
                let delta: f32 = (0..2).map(|j| b[2 * row + j].to_f32() * a[j * k + column].to_f32()).sum();
                bf16::from_f32(w[i].to_f32() + delta)
            });
            let merged = host.bf16("merged", &[n, k], &merged.collect::<Vec<_>>());
            let (x, w) = (host.bf16("x", &[m, k], &x), host.bf16("w", &[n, k], &w));
            let (a, b) = (host.bf16("a", &[1, 2, k], &a), host.bf16("b", &[1, n, 2], &b));
            let (matrices, slots) = (AdapterMatrices { a, b, segments: vec![n] }, host.u32("slots", &[0; 3]));
            let [mut expected, mut out] = ["expected", "out"].map(|name| host.zeros(name, &[m, n], DType::Bf16));
            linear(&mut host.exec, &x, &merged, &mut expected).unwrap();
            linear(&mut host.exec, &x, &w, &mut out).unwrap();
            add_adapters(&mut host.exec, &x, &matrices, &slots, &mut out).unwrap();
            let expected: Vec<f64> = expected.host::<bf16>().iter().map(|v| v.to_f64()).collect();
            // The base GEMM is rounded before the sum.
            close(out.host::<bf16>(), &expected, 2.0 / 256.0, 0.1);
        });
    }

    #[test]
    fn the_result_of_a_row_does_not_depend_on_the_others() {
        let (k, n) = (64, 33);
        Host::each(|mut host| {
            let (x, a, b) = (bf16s(9 * k, 1), factors(2 * 4 * k, 2), factors(2 * n * 4, 3));
            let (a, b) = (host.bf16("a", &[2, 4, k], &a), host.bf16("b", &[2, n, 4], &b));
            let matrices = AdapterMatrices { a, b, segments: vec![n] };
            let mut run = |rows: &[usize], slots: &[u32]| {
                let values: Vec<bf16> = rows.iter().flat_map(|row| &x[row * k..][..k]).copied().collect();
                let (x, slots) = (host.bf16("x", &[rows.len(), k], &values), host.u32("slots", slots));
                let mut out = host.zeros("out", &[rows.len(), n], DType::Bf16);
                add_adapters(&mut host.exec, &x, &matrices, &slots, &mut out).unwrap();
                out.host::<bf16>().to_vec()
            };
            let together = run(&[0, 1, 2, 3, 4, 5, 6, 7, 8], &[0, 0, 0, 1, NO_ADAPTER, 1, 1, 0, 1]);
            for (row, slot) in [(1, 0), (3, 1), (6, 1), (7, 0)] {
                assert_eq!(run(&[row], &[slot]), together[row * n..][..n]);
            }
        });
    }

    #[test]
    fn wrong_operands_are_named() {
        let mut host =
            Host { exec: pegainfer_core::exec::Exec::cpu(pegainfer_core::isa::Isa::best(), Some(1)).unwrap() };
        let (x, slots) = (host.zeros("x", &[2, 8], DType::Bf16), host.u32("slots", &[0, 0]));
        let mut out = host.zeros("out", &[2, 6], DType::Bf16);
        let mut error = |a: &[usize], b: &[usize], segments: &[usize]| {
            let (a, b) = (host.zeros("a", a, DType::Bf16), host.zeros("b", b, DType::Bf16));
            let matrices = AdapterMatrices { a, b, segments: segments.to_vec() };
            add_adapters(&mut host.exec, &x, &matrices, &slots, &mut out).unwrap_err().to_string()
        };
        for (found, expected) in [
            (error(&[1, 4, 9], &[1, 6, 4], &[6]), "a is bf16 [1, 4, 9]"),
            (error(&[1, 4, 8], &[1, 6, 3], &[6]), "a is bf16 [1, 4, 8]"),
            (error(&[1, 4, 8], &[1, 5, 4], &[5]), "b is bf16 [1, 5, 4]"),
            (error(&[1, 4, 8], &[1, 6, 4], &[7]), "fewer columns"),
            (error(&[1, 4, 8], &[1, 6, 4], &[]), "no segment"),
        ] {
            assert!(found.contains(expected), "{found}");
        }
    }
}
