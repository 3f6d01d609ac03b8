//! Seeded random values: dummy weights.

use super::check::Check;
use crate::cuda;
use pegainfer_core::exec::{Device, Exec};
use pegainfer_core::record::OpRecord;
use pegainfer_core::tensor::{DType, OpError, Tensor};
use pegainfer_core::weights;

/// Fills `out` with values drawn uniformly from ±`limit`. For a given seed and limit, all devices give the bits of
/// [`weights::uniform`].
///
/// `out`: bf16 of any shape; on a GPU rows must be multiples of 8 elements.
pub fn uniform(exec: &mut Exec, seed: u64, limit: f32, out: &mut Tensor) -> Result<(), OpError> {
    Check("uniform").that(out.dtype() == DType::Bf16, "only bf16 has dummy values")?;
    exec.record(|_| OpRecord::new("uniform", "counter", &[], &[out], 0));
    match exec.device() {
        Device::Cpu(_) => weights::uniform(out.host_mut(), seed, limit),
        Device::Cuda => cuda::uniform(exec, seed, limit, out)?,
        Device::Meta => {}
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Host;
    use half::bf16;
    use pegainfer_core::rng::{GOLDEN, mix};

    /// Element `i` alone, as a thread of csrc/rows/dummy.cu computes it.
    fn element(i: u64, seed: u64, limit: f32) -> bf16 {
        let (stream, group) = (i >> 16, i % (1 << 16) / 4);
        let bits = mix(mix(seed ^ mix(stream)).wrapping_add((group + 1).wrapping_mul(GOLDEN)));
        bf16::from_f32(f32::from((bits >> (16 * (i % 4))) as i16) / 32768.0 * limit)
    }

    #[test]
    fn every_element_is_a_function_of_its_place() {
        Host::each(|mut host| {
            // Three streams; only the rows that the tensor has are written.
            let mut out = host.zeros("out", &[1302, 104], DType::Bf16);
            out.set_range(1, 1300);
            uniform(&mut host.exec, 5, 0.03, &mut out).unwrap();
            let got = out.host::<bf16>();
            assert!((0..1300 * 104).all(|i| got[i] == element(i as u64, 5, 0.03)));
            out.set_rows(1302);
            assert!(out.host::<bf16>()[..104].iter().chain(&out.host()[1301 * 104..]).all(|v| *v == bf16::ZERO));
        });
    }
}
