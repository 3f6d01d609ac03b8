//! Rows of one tensor in place of rows of another.

use super::operands::is_values;
use crate::cuda;
use crate::ops::check::Check;
use half::bf16;
use pegainfer_core::exec::{Device, Exec};
use pegainfer_core::record::OpRecord;
use pegainfer_core::tensor::{DType, OpError, Tensor};
use std::ops::Range;

/// `to[first + i] = from[rows.start + i]` for each of `rows`: the output of an image encoder in place of the embeddings
/// of its tokens.
///
/// `from`: `[n, hidden]` bf16 or f32; `to`: `[tokens, hidden]` bf16. f32 is rounded to nearest even.
///
/// # Errors
/// Wrong shapes or dtypes; rows outside either tensor.
pub fn copy_rows(
    exec: &mut Exec,
    from: &Tensor,
    rows: Range<usize>,
    to: &mut Tensor,
    first: usize,
) -> Result<(), OpError> {
    let check = Check("copy_rows");
    let ((n, hidden), tokens) = (from.rows_cols(), to.rows_cols().0);
    is_values(check, from, &[n, hidden])?;
    check.is(to, DType::Bf16, &[tokens, hidden])?;
    let inside = rows.start <= rows.end && rows.end <= n && first + rows.len() <= tokens;
    check.that(inside, "the rows are not in the tensors")?;
    exec.record(|_| {
        let bytes = rows.len() * hidden * (from.dtype().size() + to.dtype().size());
        OpRecord::new(check.0, "copy", &[from], &[to], 0).with_bytes(bytes as u64)
    });
    match exec.device() {
        Device::Cpu(_) => {
            let to = &mut to.host_mut::<bf16>()[first * hidden..][..rows.len() * hidden];
            let elements = rows.start * hidden..rows.end * hidden;
            match from.dtype() {
                DType::F32 => {
                    let from = &from.host::<f32>()[elements];
                    to.iter_mut().zip(from).for_each(|(to, x)| *to = bf16::from_f32(*x));
                }
                _ => to.copy_from_slice(&from.host::<bf16>()[elements]),
            }
        }
        Device::Cuda => cuda::vision::copy_rows(exec, (from, rows), (to, first))?,
        Device::Meta => {}
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Host, bf16s};

    #[test]
    fn rows_are_copied_in_both_types_and_nothing_else() {
        let mut host = Host { exec: Exec::cpu(pegainfer_core::isa::Isa::best(), Some(1)).unwrap() };
        let (values, before) = (bf16s(5 * 3, 1), bf16s(4 * 3, 2));
        let from = host.bf16("from", &[5, 3], &values);
        let mut wide = host.zeros("from", &[5, 3], DType::F32);
        wide.host_mut::<f32>().iter_mut().zip(&values).for_each(|(to, x)| *to = x.to_f32());
        for from in [&from, &wide] {
            let mut to = host.bf16("to", &[4, 3], &before);
            copy_rows(&mut host.exec, from, 2..4, &mut to, 1).unwrap();
            assert_eq!(to.host::<bf16>(), [&before[..3], &values[6..12], &before[9..]].concat());
            for (rows, first) in [(4..6, 0), (0..2, 3)] {
                let error = copy_rows(&mut host.exec, from, rows, &mut to, first).unwrap_err();
                assert!(error.message.contains("not in the tensors"), "{error}");
            }
        }
    }
}
