//! Rotary position embeddings of two dimensions.

use super::operands::is_values;
use crate::cpu::vision::positions as cpu;
use crate::cuda;
use crate::ops::check::Check;
use half::bf16;
use pegainfer_core::exec::{Device, Exec};
use pegainfer_core::record::OpRecord;
use pegainfer_core::tensor::{DType, OpError, Tensor};

/// Rotates each head of queries and keys, in place: element `i < head_dim / 2` and element `i + head_dim / 2` by one
/// angle. The first `head_dim / 4` angles are those of the patch's row, the others those of its column.
///
/// `qkv`: `[n, 3, heads, head_dim]` bf16 or f32, queries, then keys, then values, which stay; `positions`: `[n, 2]`
/// u32, row and column; `table`: `[positions, head_dim / 2]` f32, cosines and sines of `head_dim / 4` angles each:
/// [`rope_table`](crate::ops::rope_table) for heads of `head_dim / 2`. f32 with one rounding.
///
/// # Errors
/// Wrong shapes or dtypes; on the CPU, a position outside the table, which stops a GPU.
pub fn rotate_grid(exec: &mut Exec, table: &Tensor, positions: &Tensor, qkv: &mut Tensor) -> Result<(), OpError> {
    let check = Check("rotate_grid");
    let ([n, heads], (sides, half)) = (dimensions(qkv), table.rows_cols());
    check.that(half.is_multiple_of(2), "the angles of rows and of columns differ in number")?;
    check.is(table, DType::F32, &[sides, half])?;
    check.is(positions, DType::U32, &[n, 2])?;
    is_values(check, qkv, &[n, 3, heads, 2 * half])?;
    exec.record(|_| {
        let bytes = qkv.bytes() / 3 * 4 + positions.bytes() + (2 * n * half * DType::F32.size()) as u64;
        let flops = 2 * qkv.elements() as u64;
        OpRecord::new(check.0, "rows", &[table, positions], &[qkv], flops).with_bytes(bytes)
    });
    match exec.device() {
        Device::Cpu(_) => {
            let positions = positions.host::<u32>().as_chunks().0;
            let inside = positions.iter().flatten().all(|p| (*p as usize) < sides);
            check.that(inside, "a position is outside the table")?;
            match qkv.dtype() {
                DType::F32 => cpu::rotate_grid::<f32>(table.host(), positions, 2 * half, qkv.host_mut()),
                _ => cpu::rotate_grid::<bf16>(table.host(), positions, 2 * half, qkv.host_mut()),
            }
        }
        Device::Cuda => cuda::vision::rotate_grid(exec, table, positions, (heads, qkv))?,
        Device::Meta => {}
    }
    Ok(())
}

/// Rows and heads of queries, keys and values.
fn dimensions(qkv: &Tensor) -> [usize; 2] {
    [0, 2].map(|i| qkv.shape().get(i).copied().unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::rope_table;
    use crate::testing::{Host, bf16s, close};

    #[test]
    fn rows_turn_the_first_half_of_the_angles_and_columns_the_second() {
        Host::each(|mut host| {
            for (heads, head_dim) in [(3, 72), (2, 64), (4, 16)] {
                let (n, width) = (19, heads * head_dim);
                let x = bf16s(n * 3 * width, 1);
                let places: Vec<u32> = (0..2 * n as u32).map(|i| i * 7 % 50).collect();
                let mut positions = host.zeros("positions", &[n, 2], DType::U32);
                positions.host_mut::<u32>().copy_from_slice(&places);
                let table = rope_table(&mut host.exec, 50, head_dim / 2, 10_000.0).unwrap();
                let mut qkv = host.bf16("qkv", &[n, 3, heads, head_dim], &x);
                rotate_grid(&mut host.exec, &table, &positions, &mut qkv).unwrap();
                let rotated = |i: usize| {
                    let (row, at) = (i / (3 * width), i % (3 * width));
                    if at >= 2 * width {
                        return x[i].to_f64();
                    }
                    let (half, quarter, d) = (head_dim / 2, head_dim / 4, at % head_dim);
                    let axis = d % half / quarter;
                    let frequency = 10_000f64.powf(-2.0 * (d % quarter) as f64 / half as f64);
                    let (sin, cos) = (f64::from(places[2 * row + axis]) * frequency).sin_cos();
                    let other = if d < half { -x[i + half].to_f64() } else { x[i - half].to_f64() };
                    x[i].to_f64() * cos + other * sin
                };
                let expected: Vec<f64> = (0..x.len()).map(rotated).collect();
                close(qkv.host::<bf16>(), &expected, 1.01 / 256.0, 1e-5);
            }
        });
    }
}
