//! The Triton kernels of `ops::gated_delta_chunks` (triton/gated_delta.py).

use super::images::{TRITON_GATED_DELTA_INTRA, TRITON_GATED_DELTA_SCAN};
use super::triton::Argument;
use crate::choice::{RECURRENT_TOKENS, TRITON_SLICES};
use crate::delta::DeltaShape;
use crate::ops::DeltaInputs;
use pegainfer_core::exec::Exec;
use pegainfer_core::tensor::{OpError, Tensor};

const CHUNK: usize = 64;

/// Kernels and their operands: addresses, and sizes of the step.
struct Step {
    shape: DeltaShape,
    tokens: usize,
    segments: usize,
    mixed: Argument,
    solve: Argument,
    weights: Argument,
    scales: Argument,
}

impl Step {
    /// `mixed` and `scratch`: addresses.
    fn new(shape: DeltaShape, (tokens, segments): (usize, usize), mixed: u64, scratch: u64) -> Self {
        let parts = DeltaShape::chunks(tokens, segments) * shape.value_heads;
        let (rows, bytes) = (parts * CHUNK, (parts * CHUNK * CHUNK * 2) as u64);
        Self {
            shape,
            tokens,
            segments,
            mixed: Argument::Tile(mixed, (tokens, shape.channels())),
            solve: Argument::Tile(scratch, (rows, CHUNK)),
            weights: Argument::Tile(scratch + bytes, (rows, CHUNK)),
            scales: Argument::Pointer(scratch + 2 * bytes),
        }
    }

    fn parts(&self, [projected, a_log, dt_bias, segments]: [Argument; 4]) -> [(&'static str, Argument); 11] {
        [
            ("qk", self.mixed),
            ("projected", projected),
            ("a_log", a_log),
            ("dt_bias", dt_bias),
            ("segments", segments),
            ("solve", self.solve),
            ("weights", self.weights),
            ("scales", self.scales),
            ("count", Argument::I32(self.segments)),
            ("key_heads", Argument::I32(self.shape.key_heads)),
            ("value_heads", Argument::I32(self.shape.value_heads)),
        ]
    }

    fn scan(&self, [segments, states, out]: [Argument; 3]) -> [(&'static str, Argument); 12] {
        [
            ("qk", self.mixed),
            ("values", self.mixed),
            ("solve", self.solve),
            ("weights", self.weights),
            ("scales", self.scales),
            ("segments", segments),
            ("states", states),
            ("out", out),
            ("count", Argument::I32(self.segments)),
            ("key_heads", Argument::I32(self.shape.key_heads)),
            ("value_heads", Argument::I32(self.shape.value_heads)),
            ("longest", Argument::I32(RECURRENT_TOKENS)),
        ]
    }
}

/// Runs the chains of more than [`RECURRENT_TOKENS`] tokens. The op has checked the operands, and that `scratch` has
/// [`DeltaShape::chunk_scratch`] bytes.
pub(super) fn triton(
    exec: &mut Exec,
    inputs: &DeltaInputs<'_>,
    shape: DeltaShape,
    states: &mut Tensor,
    scratch: &mut Tensor,
    out: &mut Tensor,
) -> Result<(), OpError> {
    let gpu = exec.gpu()?;
    let op = "gated_delta_chunks";
    let (tokens, count) = (inputs.mixed.rows_cols().0, inputs.segments.rows_cols().0);
    let step = Step::new(shape, (tokens, count), inputs.mixed.device(), scratch.device());
    let segments = Argument::input(inputs.segments);
    let parts = step.parts([
        Argument::input(inputs.projected),
        Argument::input(inputs.a_log),
        Argument::input(inputs.dt_bias),
        segments,
    ]);
    let scan = step.scan([segments, Argument::output(states), Argument::output(out)]);
    let early = &[inputs.segments];
    let (chunks, heads) = (DeltaShape::chunks(step.tokens, count), shape.value_heads);
    // SAFETY: the parameters are those of triton/gated_delta.py; the kernels read only segments before they wait.
    unsafe {
        TRITON_GATED_DELTA_INTRA.launch(gpu, op, &parts, [heads, chunks, 1], (early, &[scratch]))?;
        TRITON_GATED_DELTA_SCAN.launch(gpu, op, &scan, [heads * TRITON_SLICES, count, 1], (early, &[states, out]))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::choice::{self, DeltaChunks};
    use crate::cuda::triton::Kind;
    use crate::ops::{self, NO_STATE, SEGMENT_WORDS};
    use pegainfer_core::isa::Isa;
    use pegainfer_core::rng;
    use pegainfer_core::tensor::DType;

    const SHAPE: DeltaShape =
        DeltaShape { key_heads: 16, value_heads: 32, key_dim: 128, value_dim: 128, conv_width: 4, tiled_output: false };

    #[test]
    fn arguments_are_in_the_order_of_the_parameters() {
        let step = Step::new(SHAPE, (1000, 3), 1 << 20, 1 << 30);
        let address = Argument::Pointer(16);
        let (parts, scan) = (step.parts([address; 4]), step.scan([address; 3]));
        for (kernel, arguments) in [(&TRITON_GATED_DELTA_INTRA, &parts[..]), (&TRITON_GATED_DELTA_SCAN, &scan[..])] {
            if kernel.build((9, 0)).is_some() {
                assert!(kernel.matches(arguments), "{kernel:?}");
                assert!(!kernel.matches(&arguments[1..]));
            }
        }
    }

    #[test]
    fn slices_of_the_scan_cover_a_head() {
        let Some(values) = TRITON_GATED_DELTA_SCAN.parameters.iter().find(|p| p.name == "values") else { return };
        assert_eq!(values.kind, Kind::Tile { rows: CHUNK, columns: SHAPE.value_dim / TRITON_SLICES });
    }

    #[test]
    fn scratch_holds_what_the_kernels_leave_to_each_other() {
        for (tokens, segments) in [(320, 1), (1000, 3), (1536, 8)] {
            let step = Step::new(SHAPE, (tokens, segments), 0, 0);
            let Argument::Pointer(scales) = step.scales else { panic!("{:?}", step.scales) };
            let scales_bytes = DeltaShape::chunks(tokens, segments) * SHAPE.value_heads * 4 * CHUNK * 4;
            assert!(scales as usize + scales_bytes <= SHAPE.chunk_scratch(tokens, segments));
        }
    }

    const SLOTS: usize = 6;

    /// Output and states of the op for these segments, of seeded operands.
    fn run(exec: &mut Exec, segments: &[[u32; SEGMENT_WORDS]]) -> [Vec<f32>; 2] {
        let tokens = segments[segments.len() - 1][1] as usize;
        let value = |seed: u64, i: usize| (rng::bits(seed, i as u64) >> 40) as f32 / (1u64 << 23) as f32 - 1.0;
        let mut tensor = |name: &str, shape: &[usize], dtype, seed: u64| {
            let mut tensor = exec.tensor(name, shape, dtype).unwrap();
            let all = 0..tensor.elements();
            if dtype == DType::F32 {
                let fill = |first: usize, out: &mut [f32]| {
                    out.iter_mut().enumerate().for_each(|(i, v)| *v = value(seed, first + i));
                };
                exec.write(&mut tensor, all, fill).unwrap();
            } else {
                let fill = |first: usize, out: &mut [half::bf16]| {
                    out.iter_mut().enumerate().for_each(|(i, v)| *v = half::bf16::from_f32(value(seed, first + i)));
                };
                exec.write(&mut tensor, all, fill).unwrap();
            }
            tensor
        };
        let mixed = &tensor("mixed", &[tokens, SHAPE.channels()], DType::Bf16, 1);
        let projected = &tensor("projected", &[tokens, SHAPE.projected_width()], DType::Bf16, 2);
        let [a_log, dt_bias] = &[3, 4].map(|seed| tensor("gates", &[SHAPE.value_heads], DType::F32, seed));
        let mut states = tensor("states", &SHAPE.states(SLOTS), DType::F32, 5);
        let mut out = tensor("out", &[tokens, SHAPE.v_width()], DType::F32, 6);
        let mut words = exec.tensor("segments", &[segments.len(), SEGMENT_WORDS], DType::U32).unwrap();
        exec.fill_rows(&mut words, segments.as_flattened()).unwrap();
        let bytes = SHAPE.chunk_scratch(tokens, segments.len());
        let mut scratch = exec.tensor("scratch", &[bytes], DType::U8).unwrap();
        let inputs = DeltaInputs { mixed, projected, a_log, dt_bias, segments: &words };
        ops::gated_delta_chunks(exec, &inputs, SHAPE, &mut states, &mut scratch, &mut out).unwrap();
        [&out, &states].map(|tensor| {
            let mut host = vec![0.0; tensor.elements()];
            exec.read(tensor, 0, &mut host).unwrap();
            host
        })
    }

    /// Chains of one and of several segments, one of them empty, next to chains that the recurrence takes.
    #[test]
    #[ignore = "needs a GPU"]
    fn chains_agree_with_the_cpu() {
        let (mut cpu, mut gpu) = (Exec::cpu(Isa::best(), None).unwrap(), Exec::cuda(0, None).unwrap());
        let one = [[0, 1000, NO_STATE, 0]];
        let joined = [[0, 256, 1, 2], [256, 512, 2, 3], [512, 700, 3, 4], [700, 731, 4, 0]];
        let ragged = [
            [0, 10, 0, 0],
            [10, 90, 1, 2],
            [90, 90, 2, 3],
            [90, 400, 3, NO_STATE],
            [400, 410, 4, 4],
            [410, 700, NO_STATE, 5],
        ];
        for segments in [&one[..], &joined, &ragged] {
            let tokens = segments[segments.len() - 1][1] as usize;
            let chosen = DeltaChunks::choose(&choice::gpu(&mut gpu).unwrap().unwrap(), SHAPE, tokens, segments.len());
            assert!(matches!(chosen, DeltaChunks::Triton { .. }), "not these kernels: {chosen:?}");
            let (expected, got) = (run(&mut cpu, segments), run(&mut gpu, segments));
            for (expected, got) in expected.iter().zip(&got) {
                for (expected, got) in expected.chunks(SHAPE.value_dim).zip(got.chunks(SHAPE.value_dim)) {
                    let size = (expected.iter().map(|e| e * e).sum::<f32>() / expected.len() as f32).sqrt();
                    let near = |(e, g): (&f32, &f32)| (e - g).abs() <= (e.abs() + size) / 16.0;
                    assert!(expected.iter().zip(got).all(near), "{segments:?}");
                }
            }
        }
    }
}
