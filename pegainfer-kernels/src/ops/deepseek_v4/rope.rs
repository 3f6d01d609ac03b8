//! Partial interleaved RoPE, with YaRN in compressed layers, and its inverse on the output of attention.

use super::values::{activation, cpu, read, write};
use crate::cpu::deepseek_v4::rope as reference;
use crate::cuda::deepseek_v4 as gpu;
use crate::ops::check::Check;
use crate::rotary::{RopeSpec, Yarn};
use pegainfer_core::exec::{Device, Exec};
use pegainfer_core::record::OpRecord;
use pegainfer_core::tensor::{DType, OpError, Tensor};

/// The frequencies of one kind of layer, `[dim / 2]` f32.
#[derive(Debug)]
pub struct RopeTable {
    pub(super) frequencies: Tensor,
}

impl RopeTable {
    /// `theta^(-2i / dim)`. With YaRN, frequencies of few rotations are divided by its factor, over a linear ramp.
    /// YaRN's mscale is applied neither here nor to the softmax, because the reference has none.
    pub fn new(exec: &mut Exec, dim: usize, theta: f64, yarn: Option<Yarn>) -> Result<Self, OpError> {
        let failed = |e: std::io::Error| OpError { op: "rope", message: e.to_string() };
        let mut table = exec.tensor("rope", &[dim / 2], DType::F32).map_err(failed)?;
        let values: Vec<f32> =
            RopeSpec { yarn, ..RopeSpec::from(theta) }.frequencies(dim).iter().map(|f| *f as f32).collect();
        exec.fill_rows(&mut table, &values)?;
        Ok(Self { frequencies: table })
    }

    /// `[pairs]` f32.
    pub(crate) fn frequencies(&self) -> &Tensor {
        &self.frequencies
    }
}

/// Rotates the last dimensions of each head, in place, by its token's position, or back with `inverse`: `(a, b) -> (a
/// cos - b sin, a sin + b cos)` for neighbouring values. `x`: `[tokens, heads, dim]` bf16 or f32; `positions`:
/// `[tokens]` u32. f32 inside, one rounding at the end.
pub fn rope(
    exec: &mut Exec,
    x: &mut Tensor,
    positions: &Tensor,
    table: &RopeTable,
    inverse: bool,
) -> Result<(), OpError> {
    let check = Check("rope");
    let &[tokens, heads, dim] = x.shape() else { return check.that(false, "x must be [tokens, heads, dim]") };
    activation(check, x, &[tokens, heads, dim])?;
    check.is(positions, DType::U32, &[tokens])?;
    check.that(2 * table.frequencies.elements() <= dim, "more frequencies than pairs")?;
    let rotated = 2 * table.frequencies.elements() * tokens * heads;
    exec.record(|_| {
        let bytes = 2 * (rotated * x.dtype().size()) as u64;
        OpRecord::new("rope", "pairs", &[x, positions], &[x], 3 * rotated as u64).with_bytes(bytes)
    });
    if exec.device() == Device::Cuda {
        return gpu::rope(exec, "rope", x, positions, &table.frequencies, inverse);
    }
    if cpu(check, exec)?.is_some() {
        let mut values = read(x).into_owned();
        rotate(&mut values, (heads, dim), positions, table, inverse);
        write(x, &values);
    }
    Ok(())
}

/// Rotates the last dimensions of each head by its token's position, or back with `inverse`, on the host. `values`:
/// `[tokens, heads, dim]`; `positions`: `[tokens]` u32. Neighbouring values are a pair: `(a, b) -> (a cos - b sin, a
/// sin + b cos)`. f32 inside, the angle is `f32(position) * frequency`, sine and cosine are accurate at every position.
pub(super) fn rotate(
    values: &mut [f32],
    (heads, dim): (usize, usize),
    positions: &Tensor,
    table: &RopeTable,
    inverse: bool,
) {
    for (row, position) in values.chunks_exact_mut(heads * dim).zip(positions.host::<u32>()) {
        for head in row.chunks_exact_mut(dim) {
            reference::rotate(head, *position, table.frequencies.host(), inverse);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Host, bf16s};

    const YARN: Yarn =
        Yarn { factor: 16.0, beta_fast: 32.0, beta_slow: 1.0, original_context: 65_536.0, truncate: true };

    #[test]
    fn trap_01_no_mscale_a_rotation_keeps_lengths() {
        Host::each(|mut host| {
            let table = RopeTable::new(&mut host.exec, 64, 160_000.0, Some(YARN)).unwrap();
            let values: Vec<f32> = bf16s(2 * 512, 1).iter().map(|v| v.to_f32()).collect();
            let mut x = values.clone();
            let positions = host.u32("positions", &[1_000_003]);
            rotate(&mut x, (2, 512), &positions, &table, false);
            let length = |v: &[f32]| v.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>();
            assert_eq!(x[..448], values[..448], "only the last 64 of a head are rotated");
            for (got, pair) in x.chunks(2).zip(values.chunks(2)) {
                assert!((length(got) / length(pair) - 1.0).abs() < 1e-5);
            }
            let rotated = x[448..].to_vec();
            assert!(rotated.iter().zip(&values[448..]).any(|(a, b)| (a - b).abs() > 0.1));
            rotate(&mut x, (2, 512), &positions, &table, true);
            for (got, value) in x.iter().zip(&values) {
                assert!((got - value).abs() < 1e-5, "the inverse undoes it");
            }
        });
    }

    #[test]
    fn pairs_are_neighbours_and_angles_f32_products() {
        Host::each(|mut host| {
            let table = RopeTable::new(&mut host.exec, 64, 10_000.0, None).unwrap();
            let mut x: Vec<f32> = (0..64).map(|i| if i % 2 == 0 { 1.0 } else { 0.0 }).collect();
            let positions = host.u32("positions", &[777]);
            rotate(&mut x, (1, 64), &positions, &table, false);
            for (i, pair) in x.chunks(2).enumerate() {
                let angle = f64::from(777f32 * 10_000f64.powf(-(i as f64) / 32.0) as f32);
                assert_eq!((pair[0], pair[1]), (angle.cos() as f32, angle.sin() as f32));
            }
        });
    }
}
