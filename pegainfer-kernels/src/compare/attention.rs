//! Ops of attention layers, with and without gates.

use super::batch::Tables;
use super::call::{Call, Family, Launch, all_written};
use super::case::{EPS, Output, Values};
use super::operands::allocate;
use super::variant::{TABLES, Variant};
use crate::ops::{self, Heads};
use pegainfer_core::exec::Exec;
use pegainfer_core::record::OpRecord;
use pegainfer_core::tensor::{DType, OpError};

pub(super) const FAMILY: Family = Family { has, variants, prepare, fill, launch, outputs };

const OPS: [&str; 6] = [
    "qk_norm_rope_write_kv",
    "gated_qk_norm_rope_write_kv",
    "attention",
    "attention_gate",
    "decode_attention",
    "gated_decode_attention",
];

fn has(record: &OpRecord) -> bool {
    OPS.contains(&record.op)
}

/// Ops that write the cache and ops that decode have padded rows; attention of the last layer has only sampled rows.
fn variants(record: &OpRecord) -> Vec<Variant> {
    let one_query = || record.reads.get(TABLES).is_some_and(|tables| tables.shape[0] == record.reads[0].shape[0]);
    match record.op {
        "attention" if one_query() => vec![Variant::Plain, Variant::SampledRows],
        "attention" | "attention_gate" => vec![Variant::Plain],
        _ => Variant::with_padding(record),
    }
}

/// The rows of a batch, and scratch for the intermediate results of fused ops.
fn prepare(exec: &mut Exec, call: &mut Call<'_>, launch: &mut Launch) -> Result<(), OpError> {
    let (record, shape) = (call.record, call.case.shape);
    let tokens = call.read[0].rows_cols().0;
    let (tables, blocks) = match record.op {
        "attention" => (TABLES, call.read[1].rows_cols().0),
        "decode_attention" | "gated_decode_attention" => (10, launch.written[1].rows_cols().0),
        _ => return Ok(()),
    };
    let Some(tables) = record.reads.get(tables) else { return Err(call.unknown()) };
    launch.tables = Some(Tables::new(exec, tokens, (tables, blocks), call.case, call.variant)?);
    launch.extra = vec![allocate(exec, "q", &[tokens, shape.q_width()], DType::Bf16)?];
    Ok(())
}

fn fill(exec: &mut Exec, _: &mut Call<'_>, launch: &mut Launch, values: Values) -> Result<(), OpError> {
    launch.tables.as_mut().map_or(Ok(()), |tables| tables.fill(exec, values))
}

fn launch(exec: &mut Exec, call: &Call<'_>, launch: &mut Launch) -> Result<(), OpError> {
    let shape = call.case.shape;
    match (call.record.op, &call.read[..], &mut launch.written[..], &mut launch.extra[..], &launch.tables) {
        ("qk_norm_rope_write_kv", [qkv, q_norm, k_norm, rope, positions, slots], [q, k, v], _, _) => {
            let heads = Heads { shape, norms: (q_norm, k_norm), eps: EPS, rope, positions, slots };
            ops::qk_norm_rope_write_kv(exec, qkv, &heads, q, (k, v))
        }
        ("gated_qk_norm_rope_write_kv", [projected, q_norm, k_norm, rope, positions, slots], [q, k, v], _, _) => {
            let heads = Heads { shape, norms: (q_norm, k_norm), eps: EPS, rope, positions, slots };
            ops::gated_qk_norm_rope_write_kv(exec, projected, &heads, q, (k, v))
        }
        ("attention", [q, k, v, ..], [out], _, Some(tables)) => {
            let scale = (shape.head_dim as f32).sqrt().recip();
            ops::attention(exec, q, (k, v), &tables.batch(), shape, scale, out)
        }
        ("attention_gate", [projected, _], [attended], _, _) => ops::attention_gate(exec, projected, shape, attended),
        ("decode_attention", [x, q_norm, k_norm, rope, ..], [out, k, v], [q], Some(tables)) => {
            let [positions, slots] = &tables.newest;
            let heads = Heads { shape, norms: (q_norm, k_norm), eps: EPS, rope, positions, slots };
            ops::decode_attention(exec, x, &heads, &tables.batch(), (k, v), q, out)
        }
        ("gated_decode_attention", [x, q_norm, k_norm, rope, ..], [out, k, v], [q], Some(tables)) => {
            let [positions, slots] = &tables.newest;
            let heads = Heads { shape, norms: (q_norm, k_norm), eps: EPS, rope, positions, slots };
            ops::gated_decode_attention(exec, x, &heads, &tables.batch(), (k, v), q, out)
        }
        _ => Err(call.unknown()),
    }
}

/// Outputs with zeros in the rows that attend to nothing: those are undefined.
fn outputs(exec: &Exec, call: &Call<'_>, launch: &Launch) -> Result<Vec<Output>, OpError> {
    let mut outputs = all_written(exec, call, launch)?;
    if let (Some(tables), Some(out)) = (&launch.tables, outputs.first_mut()) {
        let rows = out.values.chunks_exact_mut(out.row).enumerate();
        rows.filter(|(row, _)| tables.pads(*row)).for_each(|(_, values)| values.fill(0.0));
    }
    Ok(outputs)
}

#[cfg(test)]
mod tests {
    use super::*;
    use pegainfer_core::record::Operand;

    #[test]
    fn sampled_rows_are_fewer_than_those_of_the_tables() {
        let operand =
            |shape: &[usize]| Operand { id: 0, name: String::new(), shape: shape.to_vec(), dtype: DType::Bf16 };
        let attention = |queries: usize| {
            let reads = [[queries, 64], [9, 64], [9, 64], [8, 1], [7, 1], [7, 2]].map(|shape| operand(&shape)).to_vec();
            OpRecord {
                op: "attention",
                kernel: "",
                reads,
                writes: vec![operand(&[queries, 64])],
                bytes: 0,
                flops: 0,
                sent: 0,
            }
        };
        assert_eq!(variants(&attention(20)), [Variant::Plain]);
        assert_eq!(variants(&attention(7)), [Variant::Plain, Variant::SampledRows]);
        let record = Variant::SampledRows.record(&attention(7));
        assert_eq!((record.reads[0].shape[0], record.writes[0].shape[0]), (5, 5));
    }
}
