//! Compares an op on two devices with the same seeded operands, in shapes that an executor recorded. `pegainfer doctor`
//! uses it to check each op on the user's GPU against its reference kernel: alone, overlapped with its neighbours and
//! replayed in a CUDA graph ([`Way`]), with the operands of a step and with rarer ones ([`Variant`](variant::Variant)).
//! Each file of ops has a [`Family`], over which [`compare`] dispatches.

mod attention;
mod batch;
mod call;
mod case;
#[cfg(feature = "deepseek-v4")]
mod deepseek_v4;
#[cfg(feature = "deepseek-v4")]
mod deepseek_v4_attention;
#[cfg(feature = "deepseek-v4")]
mod deepseek_v4_batch;
#[cfg(feature = "deepseek-v4")]
mod deepseek_v4_gemm;
mod delta;
mod dense;
mod expert_weights;
mod feed;
mod fp8;
#[cfg(test)]
mod gated;
mod layers;
mod lora;
mod moe;
mod operands;
mod sampling;
mod variant;
mod vision;
mod ways;

pub use case::Case;

use crate::choice::{self, CublasLt, Gemm, Gpu};
use call::{Call, Family};
use case::Output;
use pegainfer_core::exec::Exec;
use pegainfer_core::record::OpRecord;
use pegainfer_core::tensor::{DType, OpError};
use rayon::prelude::*;
use ways::Way;

/// Difference of two devices on one call.
#[derive(Debug, Clone)]
pub struct Comparison {
    /// The kernel of the device under test.
    pub kernel: &'static str,
    /// Largest difference of an element.
    pub absolute: f64,
    /// Largest difference of an element, relative to the root mean square of its row in the reference.
    pub relative: f64,
    /// Ways times variants that were compared.
    pub runs: usize,
    /// Ways and variants in which an element is out of tolerance.
    pub failures: Vec<String>,
}

/// All supported ops.
const FAMILIES: &[Family] = &[
    dense::FAMILY,
    attention::FAMILY,
    delta::FAMILY,
    layers::FAMILY,
    lora::FAMILY,
    sampling::FAMILY,
    moe::FAMILY,
    vision::FAMILY,
    #[cfg(feature = "deepseek-v4")]
    deepseek_v4::FAMILY,
    #[cfg(feature = "deepseek-v4")]
    deepseek_v4_attention::FAMILY,
    #[cfg(feature = "deepseek-v4")]
    deepseek_v4_gemm::FAMILY,
];

/// Runs the op of `record` on `reference`, and in every [`Way`] on `tested`, with the operands of each of its variants,
/// and compares the results. `None` for an unsupported op.
pub fn compare(
    reference: &mut Exec,
    tested: &mut Exec,
    record: &OpRecord,
    case: &Case,
) -> Result<Option<Comparison>, OpError> {
    let Some(family) = FAMILIES.iter().find(|family| (family.has)(record)) else { return Ok(None) };
    let rounds = record.kernel == Gemm::WidenedToFp8.name() || takes_rounded(record);
    let case = &Case { exact_in_fp8: case.exact_in_fp8 || rounds, ..*case };
    let record = &in_formats_of(tested, record)?;
    let mut all = Comparison { kernel: "", absolute: 0.0, relative: 0.0, runs: 0, failures: Vec::new() };
    for variant in (family.variants)(record) {
        let record = &variant.record(record);
        let alone = |exec: &mut Exec| {
            let mut call = Call::new(exec, family, record, case, variant)?;
            Way::Alone.outputs(exec, &mut call)
        };
        let expected = reference.install(alone)??.remove(0);
        let ways = |exec: &mut Exec| {
            let mut call = Call::new(exec, family, record, case, variant)?;
            Way::ALL.into_iter().map(|way| way.outputs(exec, &mut call)).collect()
        };
        let (got, records): (Result<Vec<_>, OpError>, _) = tested.install(|exec| exec.recording(ways))?;
        let called = records.iter().find(|called| called.op == record.op);
        all.kernel = called.map_or(all.kernel, |called| called.kernel);
        for (way, got) in Way::ALL.into_iter().zip(got?) {
            all.add(&format!("{way}{variant}"), &expected, &got);
        }
    }
    Ok(Some(all))
}

/// The record, with activations in bf16 if the GPU under test, unlike the one it was planned for, has no GEMM that takes
/// FP8.
fn in_formats_of(tested: &mut Exec, record: &OpRecord) -> Result<OpRecord, OpError> {
    let mut record = record.clone();
    let takes_fp8 = |gpu: Gpu| gpu.is_hopper() && gpu.cublaslt == CublasLt::BlockScales;
    if choice::gpu(tested)?.is_some_and(|gpu| !takes_fp8(gpu)) {
        let operands = record.reads.iter_mut().chain(&mut record.writes);
        operands.filter(|operand| operand.dtype == DType::E4m3).for_each(|operand| operand.dtype = DType::Bf16);
    }
    Ok(record)
}

/// True if the op's activations must be values that FP8 holds exactly.
#[cfg(feature = "deepseek-v4")]
fn takes_rounded(record: &OpRecord) -> bool {
    deepseek_v4_gemm::takes_rounded(record)
}
#[cfg(not(feature = "deepseek-v4"))]
fn takes_rounded(_: &OpRecord) -> bool {
    false
}

impl Comparison {
    /// True if the devices agree.
    pub fn ok(&self) -> bool {
        self.failures.is_empty()
    }

    /// Adds one run. `got` has the outputs of one or more launches, each like `expected`.
    fn add(&mut self, run: &str, expected: &[Output], got: &[Vec<Output>]) {
        let mut ok = !got.is_empty();
        for got in got {
            ok &= got.len() == expected.len();
            for (expected, got) in expected.iter().zip(got) {
                ok &= self.agrees(expected, got);
            }
        }
        self.runs += 1;
        if !ok {
            self.failures.push(run.to_owned());
        }
    }

    /// An element may differ in proportion to itself plus its row's root mean square: a sum of many terms that nearly
    /// cancel keeps the error of the terms.
    fn agrees(&mut self, expected: &Output, got: &Output) -> bool {
        let rows = expected.values.par_chunks(expected.row).zip(got.values.par_chunks(expected.row));
        let (absolute, relative, within) = rows
            .map(|(e, g)| difference(e, g, expected.tolerance))
            .reduce(|| (0.0, 0.0, true), |a, b| (larger(a.0, b.0), larger(a.1, b.1), a.2 && b.2));
        self.absolute = larger(self.absolute, absolute);
        self.relative = larger(self.relative, relative);
        within && expected.values.len() == got.values.len()
    }
}

/// Largest difference of one row, absolute and relative to the row's root mean square, and true if all are within
/// tolerance.
fn difference(expected: &[f32], got: &[f32], tolerance: f64) -> (f64, f64, bool) {
    let squares: f64 = expected.iter().map(|v| f64::from(*v).powi(2)).sum();
    let scale = (squares / expected.len() as f64).sqrt();
    let mut all = (0.0, true);
    for (e, g) in expected.iter().zip(got) {
        let apart = (f64::from(*e) - f64::from(*g)).abs();
        all = (larger(all.0, apart), all.1 && apart <= tolerance * (f64::from(e.abs()) + scale));
    }
    (all.0, if all.0 == 0.0 { 0.0 } else { all.0 / scale }, all.1)
}

/// The larger error; NaN is the largest.
fn larger(a: f64, b: f64) -> f64 {
    if a > b || a.is_nan() { a } else { b }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_difference_is_seen() {
        let output = |values: &[f32]| Output { tolerance: 1.0 / 64.0, row: 3, values: values.to_vec() };
        let passes = |launches: &[&[f32]]| {
            let mut all = Comparison { kernel: "", absolute: 0.0, relative: 0.0, runs: 0, failures: Vec::new() };
            let got: Vec<_> = launches.iter().map(|values| vec![output(values)]).collect();
            all.add("replayed", &[output(&[1.0, -2.0, 0.0])], &got);
            assert_eq!(all.runs, 1);
            all.ok()
        };
        let good: &[f32] = &[1.0, -2.0, 0.001];
        assert!(passes(&[good]) && passes(&[good, good]));
        assert!(!passes(&[&[1.0, -2.0, 0.1]]));
        assert!(!passes(&[&[1.0, f32::NAN, 0.0]]));
        assert!(!passes(&[&[1.0, -2.0]]));
        assert!(!passes(&[good, &[1.0, -2.0, 0.1]]), "the second launch");
        assert!(!passes(&[]), "nothing was launched");
    }
}
