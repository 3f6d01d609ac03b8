//! The mean of the residual streams, which DSpark's stages read from a layer of the model.

use super::values::{activation, cpu, read};
use crate::cpu::deepseek_v4::hyper::STREAMS;
use crate::cuda::deepseek_v4 as gpu;
use crate::ops::check::Check;
use half::bf16;
use pegainfer_core::exec::{Device, Exec};
use pegainfer_core::record::OpRecord;
use pegainfer_core::tensor::{DType, OpError, Tensor};
use std::ops::Range;

/// `out[t, part * hidden + i] = (Σ_j streams[t, j, i]) / 4`; the other columns of `out` stay unchanged.
///
/// `streams`: `[T, 4, hidden]`; `out`: `[T, parts * hidden]`, `part` below `parts`; both bf16 or both f32. Summed in
/// f32 in the order of the streams, and rounded once. Parts let one GEMM take the means of several layers.
pub fn mean_streams(exec: &mut Exec, streams: &Tensor, part: usize, out: &mut Tensor) -> Result<(), OpError> {
    let check = Check("mean_streams");
    let (tokens, width) = out.rows_cols();
    let hidden = streams.rows_cols().1 / STREAMS;
    activation(check, streams, &[tokens, STREAMS, hidden])?;
    check.is(out, streams.dtype(), &[tokens, width])?;
    check.that((part + 1) * hidden <= width, "out does not have this part")?;
    exec.record(|_| {
        let bytes = streams.bytes() + streams.bytes() / STREAMS as u64;
        OpRecord::new("mean_streams", "rows", &[streams, out], &[out], streams.elements() as u64).with_bytes(bytes)
    });
    if exec.device() == Device::Cuda {
        return gpu::mean_streams(exec, streams, part * hidden, out);
    }
    if cpu(check, exec)?.is_some() {
        let values = read(streams);
        let columns = (width, part * hidden..(part + 1) * hidden);
        match out.dtype() {
            DType::F32 => write_means(&values, columns, out.host_mut(), |mean| mean),
            _ => write_means(&values, columns, out.host_mut(), bf16::from_f32),
        }
    }
    Ok(())
}

/// Writes the means of `streams` to these columns of `out`, whose rows have `width` elements.
fn write_means<T>(streams: &[f32], (width, columns): (usize, Range<usize>), out: &mut [T], round: impl Fn(f32) -> T) {
    let hidden = columns.len();
    for (row, streams) in out.chunks_exact_mut(width).zip(streams.chunks_exact(STREAMS * hidden)) {
        for (i, out) in row[columns.clone()].iter_mut().enumerate() {
            *out = round(streams[i..].iter().step_by(hidden).sum::<f32>() / STREAMS as f32);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Host, bf16s};

    #[test]
    fn means_go_to_their_part_alone() {
        Host::each(|mut host| {
            let (tokens, hidden) = (3, 32);
            let values = bf16s(tokens * STREAMS * hidden, 1);
            let streams = host.bf16("streams", &[tokens, STREAMS, hidden], &values);
            let mut out = host.bf16("out", &[tokens, 3 * hidden], &bf16s(tokens * 3 * hidden, 2));
            let before = out.host::<bf16>().to_vec();
            mean_streams(&mut host.exec, &streams, 1, &mut out).unwrap();
            for (at, (got, before)) in out.host::<bf16>().iter().zip(before).enumerate() {
                let (t, column) = (at / (3 * hidden), at % (3 * hidden));
                let value = |j: usize| values[(t * STREAMS + j) * hidden + column % hidden].to_f64();
                let mean = (0..STREAMS).map(value).sum::<f64>() / STREAMS as f64;
                match column / hidden {
                    1 => assert!((got.to_f64() - mean).abs() <= mean.abs() / 200.0 + 1e-6, "{at}: {got} but {mean}"),
                    _ => assert_eq!(*got, before, "{at}"),
                }
            }
            assert!(mean_streams(&mut host.exec, &streams, 3, &mut out).is_err(), "a part after the end");
        });
    }
}
