//! Low-rank adapters.

use super::call::{Call, Family, Launch, all_written};
use super::case::{Output, Values};
use super::variant::Variant;
use crate::ops::lora::{AdapterMatrices, NO_ADAPTER, add_adapters};
use pegainfer_core::exec::Exec;
use pegainfer_core::record::OpRecord;
use pegainfer_core::tensor::OpError;

pub(super) const FAMILY: Family = Family { has, variants, prepare, fill, launch, outputs };

fn has(record: &OpRecord) -> bool {
    record.op == "lora"
}

/// Rows of all adapters and of none in turn, and rows that all have the same one.
fn variants(_: &OpRecord) -> Vec<Variant> {
    vec![Variant::Plain, Variant::Shared]
}

fn prepare(_: &mut Exec, _: &mut Call<'_>, _: &mut Launch) -> Result<(), OpError> {
    Ok(())
}

fn fill(exec: &mut Exec, call: &mut Call<'_>, _: &mut Launch, values: Values) -> Result<(), OpError> {
    let [_, a, _, slots, _] = &mut call.read[..] else { return Err(call.unknown()) };
    let (adapters, rows, first) = (a.shape()[0], slots.elements(), usize::from(values == Values::Earlier));
    let slot = |row: usize| match (call.variant, (row + first) % (adapters + 1)) {
        (Variant::Shared, _) => (adapters - 1) as u32,
        (_, slot) if slot < adapters => slot as u32,
        _ => NO_ADAPTER,
    };
    exec.fill_rows(slots, &(0..rows).map(slot).collect::<Vec<_>>())
}

/// Columns of each segment, which the shapes do not show: the first has half of the columns or more, the others end in
/// the middle of a vector, and a few columns are padding.
fn segments(width: usize, count: usize) -> Vec<usize> {
    let other = width / (2 * count) / 4 * 4;
    let padding = if count > 1 { 4 } else { 0 };
    let mut segments = vec![other; count];
    segments[0] = width - padding - other * (count - 1);
    segments
}

fn launch(exec: &mut Exec, call: &Call<'_>, launch: &mut Launch) -> Result<(), OpError> {
    let ([x, a, b, slots, _], [out]) = (&call.read[..], &mut launch.written[..]) else { return Err(call.unknown()) };
    let (rank, width) = (b.shape()[2], b.shape()[1]);
    let segments = segments(width, a.shape()[1] / rank);
    let [a, b] = [a, b].map(|all| all.row_range(0..all.shape()[0]));
    add_adapters(exec, x, &AdapterMatrices { a, b, segments }, slots, out)
}

fn outputs(exec: &Exec, call: &Call<'_>, launch: &Launch) -> Result<Vec<Output>, OpError> {
    all_written(exec, call, launch)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compare::{Case, compare};
    use crate::ops::HeadShape;
    use pegainfer_core::isa::Isa;
    use pegainfer_core::tensor::DType;

    const SHAPE: HeadShape = HeadShape { heads: 1, kv_heads: 1, head_dim: 64 };

    fn record(rows: usize, (k, width): (usize, usize), (rank, count): (usize, usize)) -> OpRecord {
        let exec = &mut Exec::meta().unwrap();
        let mut tensor = |name: &str, shape: &[usize], dtype| exec.tensor(name, shape, dtype).unwrap();
        let x = tensor("x", &[rows, k], DType::Bf16);
        let a = tensor("a", &[3, count * rank, k], DType::Bf16);
        let b = tensor("b", &[3, width, rank], DType::Bf16);
        let slots = tensor("adapters", &[rows], DType::U32);
        let mut out = tensor("out", &[rows, width], DType::Bf16);
        let matrices = AdapterMatrices { a, b, segments: segments(width, count) };
        let (done, mut records) = exec.recording(|exec| add_adapters(exec, &x, &matrices, &slots, &mut out));
        done.unwrap();
        records.remove(0)
    }

    #[test]
    fn instruction_sets_agree() {
        let case = Case { shape: SHAPE, context: 1, rope_theta: 1e6, exact_in_fp8: false };
        for (rows, sizes, ranks) in [(1, (64, 64), (8, 1)), (9, (256, 136), (16, 3)), (40, (128, 256), (24, 4))] {
            for isa in Isa::available() {
                let mut cpus = [Isa::available()[0], isa].map(|isa| Exec::cpu(isa, Some(2)).unwrap());
                let [reference, tested] = &mut cpus;
                let found = compare(reference, tested, &record(rows, sizes, ranks), &case).unwrap().unwrap();
                assert!(found.ok(), "{rows} rows on {}: {:?}", isa.name(), found.failures);
                // Two variants in each way.
                assert!(found.runs.is_multiple_of(2), "{} runs", found.runs);
            }
        }
    }

    #[test]
    fn segments_stay_within_the_columns() {
        assert_eq!(segments(64, 1), [64]);
        assert_eq!(segments(136, 3), [92, 20, 20]);
        assert_eq!(segments(256, 4), [156, 32, 32, 32]);
    }
}
