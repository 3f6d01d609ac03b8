//! Helpers of the op tests: tensors from seeded values, on every CPU path of this machine.

use half::bf16;
use pegainfer_core::exec::Exec;
use pegainfer_core::isa::Isa;
use pegainfer_core::tensor::{DType, Tensor};

/// A CPU to run ops on.
pub(crate) struct Host {
    pub exec: Exec,
}

impl Host {
    /// Runs `test` once for every instruction-set path of this machine.
    pub fn each(test: impl Fn(Self)) {
        for isa in Isa::available() {
            test(Self { exec: Exec::cpu(isa, Some(2)).unwrap() });
        }
    }

    pub fn zeros(&mut self, name: &str, shape: &[usize], dtype: DType) -> Tensor {
        self.exec.tensor(name, shape, dtype).unwrap()
    }

    pub fn bf16(&mut self, name: &str, shape: &[usize], values: &[bf16]) -> Tensor {
        let mut tensor = self.zeros(name, shape, DType::Bf16);
        tensor.host_mut::<bf16>().copy_from_slice(values);
        tensor
    }

    pub fn u32(&mut self, name: &str, values: &[u32]) -> Tensor {
        let mut tensor = self.zeros(name, &[values.len()], DType::U32);
        tensor.host_mut::<u32>().copy_from_slice(values);
        tensor
    }
}

/// Seeded values in [-2, 2).
pub(crate) fn bf16s(n: usize, seed: u64) -> Vec<bf16> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    (0..n)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            bf16::from_f32((state >> 40) as f32 / (1u64 << 22) as f32 - 2.0)
        })
        .collect()
}

/// Checks that every value is within `relative` of the expected one, or within `absolute` near 0.
pub(crate) fn close(got: &[bf16], expected: &[f64], relative: f64, absolute: f64) {
    assert_eq!(got.len(), expected.len());
    for (i, (g, e)) in got.iter().zip(expected).enumerate() {
        assert!((g.to_f64() - e).abs() <= relative * e.abs() + absolute, "element {i}: {g} but expected {e}");
    }
}
