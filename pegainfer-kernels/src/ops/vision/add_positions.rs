//! Learned position embeddings, interpolated.

use super::operands::is_values;
use crate::cpu::vision::positions as cpu;
use crate::cuda;
use crate::ops::check::Check;
use half::bf16;
use pegainfer_core::exec::{Device, Exec};
use pegainfer_core::record::OpRecord;
use pegainfer_core::tensor::{DType, OpError, Tensor};

/// `x[i] += Σ_t weights[i, t] * table[rows[i, t]]` for the four corners `t`: a bilinear sample of a square table of
/// positions, whose corners and weights the caller computes.
///
/// `table`: `[positions, hidden]` bf16; `rows`: `[n, 4]` u32; `weights`: `[n, 4]` f32; `x`: `[n, hidden]` bf16 or f32.
/// The sum is f32, with one rounding.
///
/// # Errors
/// Wrong shapes or dtypes; on the CPU, a row outside the table, which stops a GPU.
pub fn add_positions(
    exec: &mut Exec,
    table: &Tensor,
    (rows, weights): (&Tensor, &Tensor),
    x: &mut Tensor,
) -> Result<(), OpError> {
    let check = Check("add_positions");
    let ((n, hidden), positions) = (x.rows_cols(), table.rows_cols().0);
    check.is(table, DType::Bf16, &[positions, hidden])?;
    check.is(rows, DType::U32, &[n, 4])?;
    check.is(weights, DType::F32, &[n, 4])?;
    is_values(check, x, &[n, hidden])?;
    exec.record(|_| {
        let bytes = rows.bytes() + weights.bytes() + 2 * x.bytes() + (4 * n * hidden * DType::Bf16.size()) as u64;
        let flops = 8 * x.elements() as u64;
        OpRecord::new(check.0, "rows", &[table, rows, weights], &[x], flops).with_bytes(bytes)
    });
    match exec.device() {
        Device::Cpu(_) => {
            let (rows, weights) = (rows.host::<u32>().as_chunks().0, weights.host::<f32>().as_chunks().0);
            let inside = rows.iter().flatten().all(|row| (*row as usize) < positions);
            check.that(inside, "a position is outside the table")?;
            match x.dtype() {
                DType::F32 => cpu::add_positions::<f32>(table.host(), (rows, weights), x.host_mut()),
                _ => cpu::add_positions::<bf16>(table.host(), (rows, weights), x.host_mut()),
            }
        }
        Device::Cuda => cuda::vision::add_positions(exec, table, (rows, weights), x)?,
        Device::Meta => {}
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Host, bf16s, close};

    #[test]
    fn four_taps_are_added_with_their_weights() {
        Host::each(|mut host| {
            let (n, hidden, positions) = (21, 33, 9);
            let (table, x) = (bf16s(positions * hidden, 1), bf16s(n * hidden, 2));
            let corners: Vec<u32> = (0..4 * n as u32).map(|i| i * 5 % positions as u32).collect();
            let parts: Vec<f32> = (0..4 * n).map(|i| (i % 7) as f32 / 8.0).collect();
            let ttable = host.bf16("table", &[positions, hidden], &table);
            let (mut rows, mut weights) =
                (host.zeros("rows", &[n, 4], DType::U32), host.zeros("weights", &[n, 4], DType::F32));
            rows.host_mut::<u32>().copy_from_slice(&corners);
            weights.host_mut::<f32>().copy_from_slice(&parts);
            let mut tx = host.bf16("x", &[n, hidden], &x);
            add_positions(&mut host.exec, &ttable, (&rows, &weights), &mut tx).unwrap();
            let sum = |i: usize| {
                let corner = |t: usize| {
                    let at = 4 * (i / hidden) + t;
                    f64::from(parts[at]) * table[corners[at] as usize * hidden + i % hidden].to_f64()
                };
                x[i].to_f64() + (0..4).map(corner).sum::<f64>()
            };
            close(tx.host::<bf16>(), &(0..n * hidden).map(sum).collect::<Vec<_>>(), 1.01 / 256.0, 1e-6);
            rows.host_mut::<u32>()[5] = positions as u32;
            assert!(add_positions(&mut host.exec, &ttable, (&rows, &weights), &mut tx).is_err());
        });
    }
}
