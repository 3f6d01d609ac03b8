//! Attention without a mask inside segments.

use super::operands::is_values;
use crate::cpu::vision::attention::{self as cpu, MAX_HEAD_DIM, Shape};
use crate::cuda;
use crate::ops::check::Check;
use crate::patches::Segments;
use half::bf16;
use pegainfer_core::exec::{Device, Exec};
use pegainfer_core::record::OpRecord;
use pegainfer_core::tensor::{DType, OpError, Tensor};

/// `out = softmax(q kᵀ * scale) v` inside each segment, every row with all rows of its segment.
///
/// `qkv`: `[n, 3, heads, head_dim]` bf16 or f32: queries, keys, values; `out`: `[n, heads * head_dim]` of the same
/// type; `segments`: the rows `0..n`. `head_dim` is a multiple of 8, at most 128. Scores, softmax and sums are f32,
/// with one final rounding. A segment does not depend on the others.
///
/// # Errors
/// Wrong shapes or dtypes; on the CPU, segments that are not the rows in order.
pub fn segment_attention(
    exec: &mut Exec,
    qkv: &Tensor,
    segments: Segments<'_>,
    scale: f32,
    out: &mut Tensor,
) -> Result<(), OpError> {
    let check = Check("segment_attention");
    let Segments { indptr, scores } = segments;
    let [n, heads, head_dim] = [0, 2, 3].map(|i| qkv.shape().get(i).copied().unwrap_or(0));
    let (width, supported) = (heads * head_dim, head_dim.is_multiple_of(8) && (8..=MAX_HEAD_DIM).contains(&head_dim));
    check.that(supported, "the values of a head are no multiple of 8 up to 128")?;
    is_values(check, qkv, &[n, 3, heads, head_dim])?;
    check.is(out, qkv.dtype(), &[n, width])?;
    check.is(indptr, DType::U32, &[indptr.elements()])?;
    exec.record(|_| OpRecord::new(check.0, "tiles", &[qkv, indptr], &[out], 4 * scores * width as u64));
    match exec.device() {
        Device::Cpu(isa) => {
            let ends = indptr.host::<u32>();
            let whole = ends.first() == Some(&0) && ends.last() == Some(&(n as u32)) && ends.is_sorted();
            check.that(whole, "the segments are not the rows in order")?;
            let ranges = ends.windows(2).map(|ends| ends[0] as usize..ends[1] as usize);
            let (shape, scratch) = (Shape { heads, head_dim, scale }, &mut exec.scratch);
            match qkv.dtype() {
                DType::F32 => cpu::segment_attention::<f32>(isa, qkv.host(), ranges, shape, out.host_mut(), scratch),
                _ => cpu::segment_attention::<bf16>(isa, qkv.host(), ranges, shape, out.host_mut(), scratch),
            }
        }
        Device::Cuda => cuda::vision::segment_attention(exec, qkv, indptr, scale, out)?,
        Device::Meta => {}
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Host, bf16s, close};

    /// f64 attention of one query; `rows`: `[n, 3 width]` of its segment.
    fn reference(rows: &[bf16], query: usize, (width, head, head_dim): (usize, usize, usize), scale: f64) -> Vec<f64> {
        let part = |row: usize, which: usize| &rows[(3 * row + which) * width + head * head_dim..][..head_dim];
        let dot = |a: &[bf16], b: &[bf16]| a.iter().zip(b).map(|(a, b)| a.to_f64() * b.to_f64()).sum::<f64>();
        let n = rows.len() / (3 * width);
        let scores: Vec<f64> = (0..n).map(|key| dot(part(query, 0), part(key, 1)) * scale).collect();
        let most = scores.iter().copied().fold(f64::MIN, f64::max);
        let weights: Vec<f64> = scores.iter().map(|score| (score - most).exp()).collect();
        let total: f64 = weights.iter().sum();
        (0..head_dim).map(|d| (0..n).map(|key| weights[key] * part(key, 2)[d].to_f64()).sum::<f64>() / total).collect()
    }

    #[test]
    fn matches_f64_for_segments_of_any_length() {
        Host::each(|mut host| {
            for (heads, head_dim) in [(2, 64), (2, 72), (3, 16), (1, 128), (2, 8)] {
                let ends = [0u32, 1, 18, 18, 50, 57];
                let (n, width, scale) = (57, heads * head_dim, (head_dim as f32).sqrt().recip());
                let x = bf16s(n * 3 * width, 1);
                let (qkv, indptr) = (host.bf16("qkv", &[n, 3, heads, head_dim], &x), host.u32("indptr", &ends));
                let mut out = host.zeros("out", &[n, width], DType::Bf16);
                let segments = Segments { indptr: &indptr, scores: 0 };
                segment_attention(&mut host.exec, &qkv, segments, scale, &mut out).unwrap();
                for ends in ends.windows(2).map(|ends| [ends[0] as usize, ends[1] as usize]) {
                    let rows = &x[3 * ends[0] * width..3 * ends[1] * width];
                    for (query, head) in (ends[0]..ends[1]).flat_map(|query| (0..heads).map(move |h| (query, h))) {
                        let expected = reference(rows, query - ends[0], (width, head, head_dim), f64::from(scale));
                        let got = &out.host::<bf16>()[query * width + head * head_dim..][..head_dim];
                        close(got, &expected, 1.01 / 256.0, 1e-5);
                    }
                }
                // The third segment alone.
                let (alone, indptr) =
                    (host.bf16("qkv", &[32, 3, heads, head_dim], &x[54 * width..150 * width]), [0, 32]);
                let (indptr, mut second) = (host.u32("indptr", &indptr), host.zeros("out", &[32, width], DType::Bf16));
                let segments = Segments { indptr: &indptr, scores: 0 };
                segment_attention(&mut host.exec, &alone, segments, scale, &mut second).unwrap();
                assert_eq!(second.host::<bf16>(), &out.host::<bf16>()[18 * width..50 * width]);
            }
        });
    }

    #[test]
    fn wrong_segments_are_refused() {
        let mut host = Host { exec: Exec::cpu(pegainfer_core::isa::Isa::best(), Some(1)).unwrap() };
        let (qkv, mut out) = (host.zeros("qkv", &[4, 3, 2, 8], DType::F32), host.zeros("out", &[4, 16], DType::F32));
        for ends in [&[0u32, 3][..], &[1, 4], &[0, 3, 2, 4]] {
            let indptr = host.u32("indptr", ends);
            let segments = Segments { indptr: &indptr, scores: 0 };
            let error = segment_attention(&mut host.exec, &qkv, segments, 1.0, &mut out).unwrap_err();
            assert!(error.message.contains("not the rows in order"), "{error}");
        }
    }
}
