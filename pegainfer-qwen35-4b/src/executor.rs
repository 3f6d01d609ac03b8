//! Runs a step: the Qwen3.5 forward pass, written once over ops.

use crate::config::Config;
use crate::engine::LoadError;
use crate::plan::{self, Outcome, Segment, Step};
use crate::state::{self, LayerState};
use crate::weights::{FullAttention, Layer, LinearAttention, Mixer, Weights};
use crate::workspace::Workspace;
use pegainfer_core::exec::Exec;
use pegainfer_core::record::OpRecord;
use pegainfer_core::schedule::{Launches, StateSlots, StepExecutor};
use pegainfer_core::tensor::{DType, OpError, Tensor};
use pegainfer_kernels::ops::{self, DeltaInputs, DeltaWeights, Heads, SEGMENT_WORDS};
use pegainfer_kernels::step::{Inputs, Sampler, StepSize, StepState};

/// Largest step an executor is built for, and how much it remembers.
#[derive(Debug, Clone, Copy)]
pub struct StepBounds {
    /// What its tensors hold.
    pub size: StepSize,
    /// KV blocks of the pool.
    pub kv_blocks: usize,
    /// Fewer blocks, if a GPU has no room for as many in this share of its memory. `None` insists.
    pub gpu_memory_share: Option<f64>,
    /// Slots of recurrent state.
    pub slots: usize,
    /// Segments.
    pub segments: usize,
    /// Whether a GPU replays decode steps as graphs.
    pub graphs: bool,
}

/// Model, KV cache, recurrent state and workspace on one device.
#[derive(Debug)]
pub struct Executor {
    state: StepState<Workspace>,
    /// `[segments, SEGMENT_WORDS]`.
    segments: Tensor,
    config: Config,
    weights: Weights,
    layers: Vec<LayerState>,
    kv_blocks: usize,
    rope: Tensor,
}

impl Executor {
    /// Allocates workspace, KV cache and state beside loaded weights.
    pub fn new(mut exec: Exec, config: Config, weights: Weights, bounds: StepBounds) -> Result<Self, LoadError> {
        let StepBounds { size, segments, graphs, .. } = bounds;
        let rope = ops::rope_table(&mut exec, size.context, config.rotary_dim, config.rope_theta)?;
        let work = Workspace::new(&mut exec, &config, size.tokens, segments)?;
        let segments = exec.tensor("segments", &[segments, SEGMENT_WORDS], DType::U32)?;
        let mut state = StepState::new(exec, config.vocab_size, size, graphs, work)?;
        // Last, because what the rest has left may be what it gets.
        let kv_blocks = state::kv_blocks(&mut state.exec, &config, bounds)?;
        let layers = state::allocate(&mut state.exec, &config, kv_blocks, bounds.slots).map_err(LoadError::State)?;
        Ok(Self { state, segments, config, weights, layers, kv_blocks, rope })
    }

    /// The model's numbers.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// The execution context, to record or to ask about the device.
    pub fn exec(&mut self) -> &mut Exec {
        &mut self.state.exec
    }

    /// Blocks of the KV pool.
    pub fn kv_blocks(&self) -> usize {
        self.kv_blocks
    }

    /// Launches one step and waits for it.
    pub fn run(&mut self, step: &Step) -> Result<Outcome, OpError> {
        self.launch(step)?;
        self.finish()
    }

    /// As [`run`](Self::run), with the record of every op.
    pub fn record(&mut self, step: &Step) -> (Result<Outcome, OpError>, Vec<OpRecord>) {
        self.state.exec.start_recording();
        let outcome = self.run(step);
        (outcome, self.state.exec.stop_recording())
    }
}

impl StepExecutor for Executor {
    type State = StateSlots;

    fn useful_depth(&self) -> usize {
        self.state.useful_depth()
    }

    fn launch(&mut self, step: &Step) -> Result<(), OpError> {
        let Self { state, segments, config, weights, layers, rope, .. } = self;
        let StepState { exec, inputs, work, sampler, graphs, .. } = state;
        let samples = &step.samples;
        // A record is of the ops themselves.
        let size = graphs.size(step).filter(|_| !exec.is_recording());
        let padded = size.filter(|size| *size > step.rows.len()).map(|size| plan::padded(step, size));
        let step = padded.as_ref().unwrap_or(step);
        exec.install(|exec| {
            inputs.fill(exec, step)?;
            let words: Vec<u32> = step.state.iter().flat_map(Segment::words).collect();
            exec.fill_rows(segments, &words)?;
            work.set_rows(step.tokens.len());
            let mut pass = Pass { exec, config, weights, layers, rope, inputs, segments, work, sampler, step };
            graphs.run(size, &mut pass)
        })??;
        state.launched(samples)
    }

    fn finish(&mut self) -> Result<Outcome, OpError> {
        self.state.finish()
    }

    fn abandon(&mut self) -> Result<(), OpError> {
        self.state.abandon()
    }
}

/// The borrowed parts of one run.
struct Pass<'a> {
    exec: &'a mut Exec,
    config: &'a Config,
    weights: &'a Weights,
    layers: &'a mut [LayerState],
    rope: &'a Tensor,
    inputs: &'a mut Inputs,
    segments: &'a Tensor,
    work: &'a mut Workspace,
    sampler: &'a mut Sampler,
    step: &'a Step,
}

impl Launches for Pass<'_> {
    fn exec(&mut self) -> &mut Exec {
        self.exec
    }

    fn launch(&mut self) -> Result<(), OpError> {
        self.forward()?;
        let Self { exec, weights, inputs, work, sampler, step, .. } = self;
        sampler.run(exec, &mut work.normed, weights.output(), inputs, &step.samples)
    }
}

impl Pass<'_> {
    /// From token ids to the normalised output of the last layer, in `work.normed`: one row for each sample, because
    /// after the last layer's state is updated nothing else is wanted of the other tokens.
    fn forward(&mut self) -> Result<(), OpError> {
        let Self { exec, config, weights, inputs, work, sampler, .. } = self;
        let (layers, eps) = (&weights.layers, config.rms_norm_eps);
        ops::embedding(exec, &inputs.tokens, &sampler.sampled, &weights.embedding, &mut work.residual)?;
        ops::rms_norm(exec, &work.residual, &layers[0].input_norm, eps, &mut work.normed)?;
        for (i, layer) in layers.iter().enumerate() {
            let next = layers.get(i + 1);
            match &layer.mixer {
                Mixer::Linear(mixer) => self.linear_attention(mixer, i)?,
                // The last layer is one of full attention.
                Mixer::Full(mixer) if next.is_none() && !self.step.samples_every_token() => {
                    if !self.attention_of_samples(mixer, i)? {
                        return Ok(());
                    }
                }
                Mixer::Full(mixer) => self.full_attention(mixer, i)?,
            }
            // The MLP's end takes the next layer's input norm along.
            self.mlp(layer, next.map_or(&self.weights.norm, |next| &next.input_norm))?;
        }
        Ok(())
    }

    /// Layer `i` of the gated delta rule up to its output projection: `normed` becomes `gated`.
    fn linear_attention(&mut self, layer: &LinearAttention, i: usize) -> Result<(), OpError> {
        let Self { exec, config, layers, segments, work, step, .. } = self;
        let LayerState::Linear { states, tails } = &mut layers[i] else { unreachable!("state of another kind") };
        let (shape, eps) = (config.delta, config.rms_norm_eps);
        let Workspace { normed, projected, mixed, chunks, read, gated, .. } = &mut **work;
        ops::linear(exec, normed, &layer.projection, projected)?;
        let weights =
            DeltaWeights { conv: &layer.conv, a_log: &layer.a_log, dt_bias: &layer.dt_bias, norm: &layer.norm };
        if step.queries().1 == 1 {
            let (slots, room) = ((states, tails), (mixed, read));
            return ops::decode_delta(exec, projected, &weights, segments, shape, eps, slots, room, gated);
        }
        ops::causal_conv1d(exec, projected, weights.conv, segments, shape, tails, mixed)?;
        let inputs = DeltaInputs { mixed, projected, a_log: weights.a_log, dt_bias: weights.dt_bias, segments };
        if plan::runs_in_chunks(exec.device()) {
            ops::gated_delta_chunks(exec, &inputs, shape, states, chunks, read)?;
        } else {
            ops::gated_delta_rule(exec, &inputs, shape, states, read)?;
        }
        ops::gated_rms_norm(exec, read, projected, weights.norm, shape, eps, gated)
    }

    /// Layer `i` of full attention up to its output projection: `normed` becomes `attended`.
    fn full_attention(&mut self, layer: &FullAttention, i: usize) -> Result<(), OpError> {
        if self.step.queries().1 > 1 {
            self.queries(layer, i)?;
            return self.attend(i, false);
        }
        let Self { exec, config, layers, rope, inputs, work, step, .. } = self;
        let (heads, cache) = (heads(config, layer, rope, inputs), layers[i].cache());
        let Workspace { normed, qkv, q, attended, .. } = &mut **work;
        ops::linear(exec, normed, &layer.projection, qkv)?;
        ops::gated_decode_attention(exec, qkv, &heads, &inputs.attention(step), cache, q, attended)
    }

    /// As [`full_attention`](Self::full_attention) for the last layer, narrowed to what is sampled; says whether anything
    /// is.
    fn attention_of_samples(&mut self, layer: &FullAttention, i: usize) -> Result<bool, OpError> {
        if !self.inputs.samples_end_rows() {
            self.full_attention(layer, i)?;
            self.work.keep_outputs(self.exec, &self.inputs.sample_rows)?;
            return Ok(true);
        }
        self.queries(layer, i)?;
        if self.step.samples.is_empty() {
            return Ok(false);
        }
        self.work.keep_queries(self.exec, &self.inputs.sample_rows)?;
        self.attend(i, true)?;
        Ok(true)
    }

    /// The projections of layer `i`: `normed` becomes `q`, the gates in `qkv`, and keys and values in the cache.
    fn queries(&mut self, layer: &FullAttention, i: usize) -> Result<(), OpError> {
        let Self { exec, config, layers, rope, inputs, work, .. } = self;
        let (heads, cache) = (heads(config, layer, rope, inputs), layers[i].cache());
        let Workspace { normed, qkv, q, .. } = &mut **work;
        ops::linear(exec, normed, &layer.projection, qkv)?;
        ops::gated_qk_norm_rope_write_kv(exec, qkv, &heads, q, cache)
    }

    /// What the queries of layer `i` find in its cache: `q` becomes `attended`, of the sampled tokens or of all.
    fn attend(&mut self, i: usize, sampled: bool) -> Result<(), OpError> {
        let Self { exec, config, layers, inputs, work, step, .. } = self;
        let (shape, (k, v)) = (config.shape, layers[i].cache());
        let Workspace { qkv, q, attended, .. } = &mut **work;
        let batch = if sampled { inputs.sampled_attention(step) } else { inputs.attention(step) };
        let scale = (shape.head_dim as f32).sqrt().recip();
        ops::attention(exec, q, (k, v), &batch, shape, scale, attended)?;
        ops::attention_gate(exec, qkv, shape, attended)
    }

    /// The rest: what was mixed goes into the residual stream, and `normed` becomes that under the norm that comes `next`.
    fn mlp(&mut self, layer: &Layer, next: &Tensor) -> Result<(), OpError> {
        let Self { exec, config, work, .. } = self;
        let eps = config.rms_norm_eps;
        let Workspace { residual, delta, normed, gated, attended, gate_up, activated, .. } = &mut **work;
        let (mixed, out) = match &layer.mixer {
            Mixer::Linear(mixer) => (gated, &mixer.out),
            Mixer::Full(mixer) => (attended, &mixer.out),
        };
        ops::linear_add_norm(exec, mixed, out, residual, &layer.post_norm, eps, delta, normed)?;
        ops::linear_swiglu(exec, normed, &layer.gate_up, gate_up, activated)?;
        ops::linear_add_norm(exec, activated, &layer.down, residual, next, eps, delta, normed)
    }
}

/// The heads of a layer of full attention, for the tokens of a step.
fn heads<'a>(config: &Config, layer: &'a FullAttention, rope: &'a Tensor, inputs: &'a Inputs) -> Heads<'a> {
    let (norms, eps) = ((&layer.q_norm, &layer.k_norm), config.rms_norm_eps);
    Heads { shape: config.shape, norms, eps, rope, positions: &inputs.positions, slots: &inputs.slots }
}
