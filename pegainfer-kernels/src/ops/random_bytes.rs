//! Seeded random bytes: codes of dummy weights.

use super::check::Check;
use crate::cuda;
use pegainfer_core::exec::{Device, Exec};
use pegainfer_core::record::OpRecord;
use pegainfer_core::tensor::{DType, OpError, Tensor};
use pegainfer_core::weights;

/// Fills `out` with random bytes, each masked by `mask`. For a given seed and mask, all devices
/// give the bytes of [`weights::random_bytes`].
///
/// `out`: u8 of any shape. For a GPU the host computes bytes that are not whole words of eight.
pub fn random_bytes(exec: &mut Exec, seed: u64, mask: u8, out: &mut Tensor) -> Result<(), OpError> {
    Check("random_bytes").that(out.dtype() == DType::U8, "out must be u8")?;
    exec.record(|_| OpRecord::new("random_bytes", "counter", &[], &[out], 0));
    match exec.device() {
        Device::Cpu(_) => weights::random_bytes(out.host_mut(), seed, mask),
        // Whole words, aligned to them.
        Device::Cuda if (out.device() | out.elements() as u64).is_multiple_of(8) => {
            cuda::random_bytes(exec, seed, mask, out)?;
        }
        Device::Cuda => {
            let elements = out.elements();
            let fill = |first: usize, chunk: &mut [u8]| weights::random_bytes_from(first, chunk, seed, mask);
            exec.write(out, 0..elements, fill)?;
        }
        Device::Meta => {}
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Host;
    use pegainfer_core::rng::{GOLDEN, mix};

    /// Byte `i` alone.
    fn byte(i: u64, seed: u64, mask: u8) -> u8 {
        let (stream, group) = (i >> 16, i % (1 << 16) / 8);
        let bits = mix(mix(seed ^ mix(stream)).wrapping_add((group + 1).wrapping_mul(GOLDEN)));
        (bits >> (8 * (i % 8))) as u8 & mask
    }

    #[test]
    fn every_byte_is_a_function_of_its_place() {
        Host::each(|mut host| {
            // Three streams; only the rows that the tensor has are written.
            let mut out = host.zeros("out", &[1302, 104], DType::U8);
            out.set_range(1, 1300);
            random_bytes(&mut host.exec, 5, 0xbf, &mut out).unwrap();
            let got = out.host::<u8>();
            assert!((0..1300 * 104).all(|i| got[i] == byte(i as u64, 5, 0xbf)));
            out.set_rows(1302);
            assert!(out.host::<u8>()[..104].iter().chain(&out.host()[1301 * 104..]).all(|v| *v == 0));
        });
        // As a GPU gets them: in chunks that begin at streams.
        let mut chunk = vec![0; 100];
        weights::random_bytes_from(2 << 16, &mut chunk, 9, 0xff);
        assert!((0..100).all(|i| chunk[i] == byte((2 << 16) + i as u64, 9, 0xff)));
    }
}
