//! The ops of a gated delta rule layer, and a ragged step of segments for them.

use super::call::{Call, Family, Launch, all_written};
use super::case::{EPS, Output, Values};
use super::operands::allocate;
use super::variant::Variant;
use crate::ops::{self, DeltaInputs, DeltaShape, DeltaWeights, NO_STATE};
use pegainfer_core::exec::Exec;
use pegainfer_core::record::OpRecord;
use pegainfer_core::tensor::{DType, OpError};

pub(super) const FAMILY: Family = Family { has, variants, prepare, fill, launch, outputs };

const OPS: [&str; 5] = ["causal_conv1d", "gated_delta_rule", "gated_delta_chunks", "gated_rms_norm", "decode_delta"];

/// Elements of a head of q, k and v, and width of the convolution: a record does not say them, and GPU kernels are
/// built for no others.
const DIM: usize = 128;
const CONV_WIDTH: usize = 4;
/// Tolerance of GEMMs with operands rounded to bf16. Errors average 0.3 %. Against an f64 recurrence with keys of any
/// similarity, the largest of many is 3 % of the root mean square of a row.
const CHUNKS_TOLERANCE: f64 = 1.0 / 16.0;

/// The heads of a layer with projection and convolution of these widths.
fn shape(projected_width: usize, channels: usize) -> DeltaShape {
    // The projection contains z, b and a in addition to the channels.
    let value_heads = (projected_width - channels) / (DIM + 2);
    let key_heads = (channels - value_heads * DIM) / (2 * DIM);
    DeltaShape { key_heads, value_heads, key_dim: DIM, value_dim: DIM, conv_width: CONV_WIDTH, tiled_output: false }
}

/// Segments of about equal length, in turn: one that continues in its slot and one that continues from there, unless
/// each has one token; one that starts a sequence; one whose state is not kept. Segments beyond the slots have no
/// state.
fn segments(count: usize, tokens: usize, slots: usize) -> Vec<u32> {
    let slot = |i: usize| if i < slots { i as u32 } else { NO_STATE };
    let joined = tokens > count;
    let segment = |i: usize| {
        let (from, to) = match i % 4 {
            1 if joined => (slot(i - 1), slot(i)),
            2 => (NO_STATE, slot(i)),
            3 => (slot(i), NO_STATE),
            _ => (slot(i), slot(i)),
        };
        [(i * tokens / count) as u32, ((i + 1) * tokens / count) as u32, from, to]
    };
    (0..count).flat_map(segment).collect()
}

fn has(record: &OpRecord) -> bool {
    OPS.contains(&record.op)
}

fn variants(record: &OpRecord) -> Vec<Variant> {
    if record.op == "decode_delta" { Variant::with_padding(record) } else { vec![Variant::Plain] }
}

/// Segments first, then scratch.
fn prepare(exec: &mut Exec, call: &mut Call<'_>, launch: &mut Launch) -> Result<(), OpError> {
    let mut extra = |name: &str, shape: &[usize], dtype: DType| -> Result<(), OpError> {
        launch.extra.push(allocate(exec, name, shape, dtype)?);
        Ok(())
    };
    match (call.record.op, &call.read[..]) {
        ("causal_conv1d", [_, _, like, _]) | ("gated_delta_rule", [_, _, _, _, like, _]) => {
            extra("segments", like.shape(), DType::U32)
        }
        ("gated_delta_chunks", [mixed, projected, _, _, like, _]) => {
            let shape = shape(projected.rows_cols().1, mixed.rows_cols().1);
            extra("segments", like.shape(), DType::U32)?;
            extra("scratch", &[shape.chunk_scratch(mixed.rows_cols().0, like.rows_cols().0)], DType::U8)
        }
        ("decode_delta", [projected, conv, _, _, _, like, ..]) => {
            let ((rows, columns), channels) = (projected.rows_cols(), conv.rows_cols().1);
            extra("segments", like.shape(), DType::U32)?;
            extra("mixed", &[rows, channels], DType::Bf16)?;
            extra("read", &[rows, shape(columns, channels).v_width()], DType::F32)
        }
        _ => Ok(()),
    }
}

/// Rows that decode keep no state in the step that a graph is captured with.
fn fill(exec: &mut Exec, call: &mut Call<'_>, launch: &mut Launch, values: Values) -> Result<(), OpError> {
    let [to, ..] = &mut launch.extra[..] else { return Ok(()) };
    // A recurrent or a convolution state for each slot.
    let slots = launch.written.get(1).map_or(0, |kept| kept.rows_cols().0);
    let (count, tokens) = (to.rows_cols().0, call.read[0].rows_cols().0);
    let kept = if values == Values::Earlier && tokens == count { 0 } else { slots };
    let mut words = segments(count, tokens, kept);
    call.variant.drop_states(&mut words);
    exec.fill_rows(to, &words)
}

fn launch(exec: &mut Exec, call: &Call<'_>, launch: &mut Launch) -> Result<(), OpError> {
    match (call.record.op, &call.read[..], &mut launch.written[..], &mut launch.extra[..]) {
        ("causal_conv1d", [projected, weight, ..], [out, conv_states], [segments]) => {
            let shape = shape(projected.rows_cols().1, out.rows_cols().1);
            ops::causal_conv1d(exec, projected, weight, segments, shape, conv_states, out)
        }
        ("gated_delta_rule", [mixed, projected, a_log, dt_bias, ..], [out, states], [segments]) => {
            let shape = shape(projected.rows_cols().1, mixed.rows_cols().1);
            let inputs = DeltaInputs { mixed, projected, a_log, dt_bias, segments };
            ops::gated_delta_rule(exec, &inputs, shape, states, out)
        }
        ("gated_delta_chunks", [mixed, projected, a_log, dt_bias, ..], [out, states], [segments, scratch]) => {
            let shape = shape(projected.rows_cols().1, mixed.rows_cols().1);
            let inputs = DeltaInputs { mixed, projected, a_log, dt_bias, segments };
            ops::gated_delta_chunks(exec, &inputs, shape, states, scratch, out)
        }
        ("gated_rms_norm", [x, projected, weight], [out], _) => {
            let (width, columns) = (x.rows_cols().1, projected.rows_cols().1);
            let shape = shape(columns, columns - width / DIM * (DIM + 2));
            ops::gated_rms_norm(exec, x, projected, weight, shape, EPS, out)
        }
        ("decode_delta", [projected, conv, a_log, dt_bias, norm, ..], [out, states, conv_states], extra) => {
            let [segments, mixed, read] = extra else { return Err(call.unknown()) };
            let shape = shape(projected.rows_cols().1, conv.rows_cols().1);
            let weights = DeltaWeights { conv, a_log, dt_bias, norm };
            let (kept, scratch) = ((states, conv_states), (mixed, read));
            ops::decode_delta(exec, projected, &weights, segments, shape, EPS, kept, scratch, out)
        }
        _ => Err(call.unknown()),
    }
}

fn outputs(exec: &Exec, call: &Call<'_>, launch: &Launch) -> Result<Vec<Output>, OpError> {
    let mut outputs = all_written(exec, call, launch)?;
    match (call.record.op, &mut outputs[..]) {
        ("gated_delta_chunks", outputs) => outputs.iter_mut().for_each(|output| output.tolerance = CHUNKS_TOLERANCE),
        // Inputs of the states were rounded to bf16, which two devices may do differently.
        ("decode_delta", [out, states, _]) => states.tolerance = out.tolerance,
        _ => {}
    }
    Ok(outputs)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compare::{Case, compare};
    use crate::ops::{HeadShape, SEGMENT_WORDS};
    use pegainfer_core::isa::Isa;

    #[test]
    fn widths_say_which_heads() {
        for (key_heads, value_heads) in [(16, 32), (2, 4), (16, 16), (16, 48)] {
            let expected = DeltaShape {
                key_heads,
                value_heads,
                key_dim: DIM,
                value_dim: DIM,
                conv_width: CONV_WIDTH,
                tiled_output: false,
            };
            assert_eq!(shape(expected.projected_width(), expected.channels()), expected);
        }
    }

    #[test]
    fn segments_cover_the_tokens() {
        for (count, tokens, slots) in [(1, 1, 1), (5, 5, 9), (7, 100, 5), (8, 9, 8)] {
            let words = segments(count, tokens, slots);
            let words = words.as_chunks::<SEGMENT_WORDS>().0;
            assert_eq!((words[0][0], words[count - 1][1]), (0, tokens as u32));
            assert!(words.windows(2).all(|pair| pair[0][1] == pair[1][0]));
            let writes = |slot: u32| words.iter().filter(|segment| segment[3] == slot).count();
            assert!((0..slots as u32).all(|slot| writes(slot) <= 1));
        }
    }

    #[test]
    fn a_recorded_step_can_be_compared() {
        let shape = DeltaShape {
            key_heads: 1,
            value_heads: 2,
            key_dim: DIM,
            value_dim: DIM,
            conv_width: CONV_WIDTH,
            tiled_output: false,
        };
        let (rows, slots) = (5, 6);
        let mut meta = Exec::meta().unwrap();
        let mut tensor = |name: &str, shape: &[usize], dtype| meta.tensor(name, shape, dtype).unwrap();
        let projected = &tensor("projected", &[rows, shape.projected_width()], DType::Bf16);
        let conv = &tensor("conv", &[CONV_WIDTH, shape.channels()], DType::F32);
        let [a_log, dt_bias] = &["a_log", "dt_bias"].map(|name| tensor(name, &[shape.value_heads], DType::F32));
        let norm = &tensor("norm", &[DIM], DType::F32);
        let segments = &tensor("segments", &[rows, SEGMENT_WORDS], DType::U32);
        let mut states = tensor("states", &shape.states(slots), DType::F32);
        let mut conv_states = tensor("conv_states", &shape.conv_states(slots), DType::Bf16);
        let mut mixed = tensor("mixed", &[rows, shape.channels()], DType::Bf16);
        let mut read = tensor("read", &[rows, shape.v_width()], DType::F32);
        let mut out = tensor("out", &[rows, shape.v_width()], DType::Bf16);
        let ((), records) = meta.recording(|exec| {
            ops::causal_conv1d(exec, projected, conv, segments, shape, &mut conv_states, &mut mixed).unwrap();
            let inputs = DeltaInputs { mixed: &mixed, projected, a_log, dt_bias, segments };
            ops::gated_delta_rule(exec, &inputs, shape, &mut states, &mut read).unwrap();
            let mut scratch = exec.tensor("scratch", &[0], DType::U8).unwrap();
            ops::gated_delta_chunks(exec, &inputs, shape, &mut states, &mut scratch, &mut read).unwrap();
            ops::gated_rms_norm(exec, &read, projected, norm, shape, EPS, &mut out).unwrap();
            let weights = DeltaWeights { conv, a_log, dt_bias, norm };
            let (kept, scratch) = ((&mut states, &mut conv_states), (&mut mixed, &mut read));
            ops::decode_delta(exec, projected, &weights, segments, shape, EPS, kept, scratch, &mut out).unwrap();
        });
        let heads = HeadShape { heads: 1, kv_heads: 1, head_dim: 64 };
        let case = Case { shape: heads, context: 1, rope_theta: 1e4, exact_in_fp8: false };
        let mut cpus = [1, 2].map(|threads| Exec::cpu(Isa::available()[0], Some(threads)).unwrap());
        let [one, other] = &mut cpus;
        assert_eq!(records.len(), 5);
        for record in records {
            let result = compare(one, other, &record, &case).unwrap().unwrap();
            assert!(result.ok() && result.absolute == 0.0, "{}: {result:?}", record.op);
            let variants = if record.op == "decode_delta" { 2 } else { 1 };
            assert_eq!(result.runs, 3 * variants, "{}", record.op);
        }
    }
}
