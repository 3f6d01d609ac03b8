//! Reference kernel of `ops::causal_conv1d`.

use super::disjoint::Disjoint;
use super::isa::Isa;
use super::lanes::{Kernel, Lanes, chunk, chunk_mut, dispatch};
use super::rows::per_task;
use super::sigmoid::silu;
use crate::delta::{DeltaShape, MAX_CONV_WIDTH, NO_STATE, Segment};
use half::bf16;
use pegainfer_core::team;

/// Channels per task: the rows of one segment in these columns stay in the L1 cache across the convolution's width.
const BLOCK: usize = 128;

/// Read-only operands; see the op.
pub struct Inputs<'a> {
    /// `[tokens, projected_width]`.
    pub projected: &'a [bf16],
    /// `[conv_width, channels]`.
    pub weight: &'a [f32],
    /// `[segments, SEGMENT_WORDS]`, checked.
    pub segments: &'a [u32],
    /// Head counts and sizes.
    pub shape: DeltaShape,
}

/// See `ops::causal_conv1d`; segments were checked.
pub fn run(isa: Isa, inputs: &Inputs<'_>, conv_states: &mut [bf16], out: &mut [bf16]) {
    let channels = inputs.shape.channels();
    assert!(inputs.shape.is_supported(), "{:?}", inputs.shape);
    let tokens = out.len() / channels;
    let shared = &(Disjoint::new(conv_states), Disjoint::new(out));
    team::for_each_range(channels.div_ceil(BLOCK), per_task(4 * tokens * BLOCK), |blocks| {
        for first in blocks.map(|block| block * BLOCK) {
            dispatch(isa, Columns { inputs, first, width: BLOCK.min(channels - first), shared });
        }
    });
}

/// Computes some of the channels of [`run`] for all tokens.
struct Columns<'a> {
    inputs: &'a Inputs<'a>,
    first: usize,
    width: usize,
    /// Convolution states and output.
    shared: &'a (Disjoint<'a>, Disjoint<'a>),
}

impl Kernel for Columns<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Lanes>(self, s: S) {
        for segment in Segment::unpack(self.inputs.segments) {
            let history = self.conv_state(segment.from);
            for token in segment.tokens() {
                let rows: [&[bf16]; MAX_CONV_WIDTH] =
                    std::array::from_fn(|tap| self.input(&segment, &history, token + tap));
                self.token(s, token, &rows);
            }
            self.keep(&segment, &history);
        }
    }
}

impl Columns<'_> {
    /// The convolution state in `slot`: row `i` is the input `conv_width - 1 - i` tokens before the segment.
    #[inline(always)]
    fn conv_state(&self, slot: u32) -> [[bf16; BLOCK]; MAX_CONV_WIDTH] {
        let mut history = [[bf16::ZERO; BLOCK]; MAX_CONV_WIDTH];
        if slot != NO_STATE {
            for (i, row) in history.iter_mut().take(self.inputs.shape.conv_width - 1).enumerate() {
                // SAFETY: these channels of every slot belong to this task.
                row[..self.width].copy_from_slice(unsafe { self.state_row(slot, i) });
            }
        }
        history
    }

    /// These channels of row `i` of a convolution state.
    ///
    /// # Safety
    /// They belong to this task, and no other reference to them exists.
    #[inline(always)]
    #[allow(clippy::mut_from_ref)] // the caller promises disjoint parts
    unsafe fn state_row(&self, slot: u32, i: usize) -> &mut [bf16] {
        let shape = self.inputs.shape;
        let at = (slot as usize * (shape.conv_width - 1) + i) * shape.channels() + self.first;
        // SAFETY: the caller's promise.
        unsafe { self.shared.0.slice(at, self.width) }
    }

    /// The input `conv_width - 1` tokens before `at`, from the segment or from its history.
    #[inline(always)]
    fn input<'b>(&'b self, segment: &Segment, history: &'b [[bf16; BLOCK]; MAX_CONV_WIDTH], at: usize) -> &'b [bf16] {
        let shape = self.inputs.shape;
        let (first, back) = (segment.first as usize, shape.conv_width - 1);
        match (at - first).checked_sub(back) {
            None => &history[at - first][..self.width],
            // Beyond the newest tap of the last token: `run` requests as many rows as the maximum width of a
            // convolution.
            Some(i) if first + i >= segment.end as usize => &[],
            Some(i) => &self.inputs.projected[(first + i) * shape.projected_width() + self.first..][..self.width],
        }
    }

    /// One token of the output: `silu(Σ weight[tap] rows[tap])`, oldest tap first.
    #[inline(always)]
    fn token<S: Lanes>(&self, s: S, token: usize, rows: &[&[bf16]; MAX_CONV_WIDTH]) {
        let shape = self.inputs.shape;
        // SAFETY: these columns of the output belong to this task.
        let out = unsafe { self.shared.1.slice(token * shape.channels() + self.first, self.width) };
        for at in (0..self.width).step_by(16) {
            let mut sum = s.splat(0.0);
            for (tap, row) in rows.iter().take(shape.conv_width).enumerate() {
                let weight = &self.inputs.weight[tap * shape.channels() + self.first + at..];
                sum = s.fma(s.widen(chunk(&row[at..])), s.load(chunk(weight)), sum);
            }
            s.narrow(silu(s, sum), chunk_mut(&mut out[at..]));
        }
    }

    /// Leaves the last inputs of the segment in its slot, if it has one.
    #[inline(always)]
    fn keep(&self, segment: &Segment, history: &[[bf16; BLOCK]; MAX_CONV_WIDTH]) {
        if segment.to == NO_STATE {
            return;
        }
        for i in 0..self.inputs.shape.conv_width - 1 {
            let row = self.input(segment, history, segment.end as usize + i);
            // SAFETY: these channels of every slot belong to this task.
            unsafe { self.state_row(segment.to, i) }.copy_from_slice(row);
        }
    }
}
