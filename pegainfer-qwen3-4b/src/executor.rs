//! Runs a step: the Qwen3 forward pass, written once over ops.
//!
//! A step is launched and finished: on a GPU `launch` only enqueues it, and the next one may be launched before the host
//! has seen the tokens of this one. They stay on the device, where [`PLACEHOLDER`](crate::plan::PLACEHOLDER) finds
//! them; a copy of them is on its way to the host.

use crate::config::Config;
use crate::decode;
use crate::engine::LoadError;
use crate::plan::{Outcome, Step};
use crate::state::{self, KvLayer};
use crate::weights::{Layer, Weights};
use crate::workspace::Workspace;
use pegainfer_core::exec::Exec;
use pegainfer_core::record::OpRecord;
use pegainfer_core::schedule::{Launches, StepExecutor};
use pegainfer_core::tensor::{OpError, Tensor};
use pegainfer_kernels::ops::{self, DecodeState, Heads};
use pegainfer_kernels::step::{Inputs, Sampler, StepSize, StepState};

/// Largest step an executor is built for.
#[derive(Debug, Clone, Copy)]
pub struct StepBounds {
    /// What its tensors hold.
    pub size: StepSize,
    /// KV blocks of the pool.
    pub kv_blocks: usize,
    /// Fewer blocks, if a GPU has no room for as many in this share of its memory. `None` insists.
    pub gpu_memory_share: Option<f64>,
    /// Whether a GPU replays decode steps as graphs.
    pub graphs: bool,
}

/// Model, KV cache and workspace on one device.
#[derive(Debug)]
pub struct Executor {
    state: StepState<Workspace>,
    config: Config,
    weights: Weights,
    kv: Vec<KvLayer>,
    kv_blocks: usize,
    rope: Tensor,
    /// Where steps of few rows run all layers at once.
    decode: Option<DecodeState>,
}

impl Executor {
    /// Allocates workspace and KV beside loaded weights.
    pub fn new(mut exec: Exec, config: Config, weights: Weights, bounds: StepBounds) -> Result<Self, LoadError> {
        let StepBounds { size, graphs, .. } = bounds;
        let rope = ops::rope_table(&mut exec, size.context, config.shape.head_dim, config.rope_theta)?;
        let work = Workspace::new(&mut exec, &config, size.tokens)?;
        let mut state = StepState::new(exec, config.vocab_size, size, graphs, work)?;
        // Last, because what the rest has left may be what it gets.
        let kv_blocks = state::kv_blocks(&mut state.exec, &config, bounds)?;
        let mut kv = state::allocate_kv(&mut state.exec, &config, kv_blocks).map_err(LoadError::KvCache)?;
        let decode = DecodeState::new(&mut state.exec, &decode::model(&config, &weights, &mut kv, &rope))?;
        Ok(Self { state, config, weights, kv, kv_blocks, rope, decode })
    }

    /// The execution context, to record or to ask about the device.
    pub fn exec(&mut self) -> &mut Exec {
        &mut self.state.exec
    }

    /// The model's numbers.
    pub fn config(&self) -> &Config {
        &self.config
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
    type State = ();

    fn useful_depth(&self) -> usize {
        self.state.useful_depth()
    }

    fn launch(&mut self, step: &Step) -> Result<(), OpError> {
        let Self { state, config, weights, kv, rope, decode, .. } = self;
        let (decode, samples) = (decode.as_mut(), &step.samples);
        let StepState { exec, inputs, work, sampler, graphs, .. } = state;
        // A record is of the ops themselves.
        let size = graphs.size(step).filter(|_| !exec.is_recording());
        let padded = size.filter(|size| *size > step.rows.len()).map(|size| step.padded(size));
        let step = padded.as_ref().unwrap_or(step);
        exec.install(|exec| {
            inputs.fill(exec, step)?;
            work.set_rows(step.tokens.len());
            graphs.run(size, &mut Pass { exec, config, weights, kv, rope, decode, inputs, work, sampler, step })
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
    kv: &'a mut [KvLayer],
    rope: &'a Tensor,
    decode: Option<&'a mut DecodeState>,
    inputs: &'a mut Inputs,
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
    /// after the keys and values of the last layer nothing else is wanted of the other tokens.
    fn forward(&mut self) -> Result<(), OpError> {
        let (layers, eps) = (&self.weights.layers, self.config.rms_norm_eps);
        let Self { exec, config, weights, kv, rope, decode, inputs, work, sampler, step } = self;
        ops::embedding(exec, &inputs.tokens, &sampler.sampled, &weights.embedding, &mut work.residual)?;
        if let Some(state) = decode.as_deref_mut().filter(|_| decode::takes(step)) {
            let (mut model, batch) = (decode::model(config, weights, kv, rope), inputs.attention(step));
            let ((mut scratch, residual, normed), at) = (decode::room(work), (&inputs.positions, &inputs.slots));
            return ops::decode_layers(exec, &mut model, Some(state), at, &batch, &mut scratch, residual, normed);
        }
        ops::rms_norm(exec, &work.residual, &layers[0].input_norm, eps, &mut work.normed)?;
        for (i, layer) in layers.iter().enumerate() {
            let next = layers.get(i + 1);
            if next.is_some() || self.step.samples_every_token() {
                self.attention(layer, i)?;
            } else if !self.attention_of_samples(layer, i)? {
                return Ok(());
            }
            // The MLP's end takes the next layer's input norm along.
            self.mlp(layer, next.map_or(&self.weights.norm, |next| &next.input_norm))?;
        }
        Ok(())
    }

    /// The first half of layer `i`, up to its output projection: `normed` becomes `attended`.
    fn attention(&mut self, layer: &Layer, i: usize) -> Result<(), OpError> {
        if self.step.queries().1 > 1 {
            self.queries(layer, i)?;
            return self.attend(i, false);
        }
        let Self { exec, config, kv, rope, inputs, work, step, .. } = self;
        let (heads, cache) = (heads(config, layer, rope, inputs), (&mut kv[i].k, &mut kv[i].v));
        let Workspace { normed, qkv, q, attended, .. } = &mut **work;
        ops::linear(exec, normed, &layer.qkv, qkv)?;
        ops::decode_attention(exec, qkv, &heads, &inputs.attention(step), cache, q, attended)
    }

    /// As [`attention`](Self::attention) for the last layer, narrowed to what is sampled; says whether anything is.
    fn attention_of_samples(&mut self, layer: &Layer, i: usize) -> Result<bool, OpError> {
        if !self.inputs.samples_end_rows() {
            self.attention(layer, i)?;
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

    /// The projections of layer `i`: `normed` becomes `q`, and keys and values in the cache.
    fn queries(&mut self, layer: &Layer, i: usize) -> Result<(), OpError> {
        let Self { exec, config, kv, rope, inputs, work, .. } = self;
        let (heads, cache) = (heads(config, layer, rope, inputs), (&mut kv[i].k, &mut kv[i].v));
        let Workspace { normed, qkv, q, .. } = &mut **work;
        ops::linear_qkv(exec, (normed, &layer.qkv), &heads, qkv, q, cache)
    }

    /// What the queries of layer `i` find in its cache: `q` becomes `attended`, of the sampled tokens or of all.
    fn attend(&mut self, i: usize, sampled: bool) -> Result<(), OpError> {
        let Self { exec, config, kv, inputs, work, step, .. } = self;
        let (shape, cache) = (config.shape, (&kv[i].k, &kv[i].v));
        let batch = if sampled { inputs.sampled_attention(step) } else { inputs.attention(step) };
        let scale = (shape.head_dim as f32).sqrt().recip();
        ops::attention(exec, &work.q, cache, &batch, shape, scale, &mut work.attended)
    }

    /// The rest: `attended` goes into the residual stream, and `normed` becomes that under the norm that comes `next`.
    fn mlp(&mut self, layer: &Layer, next: &Tensor) -> Result<(), OpError> {
        let Self { exec, config, work, .. } = self;
        let eps = config.rms_norm_eps;
        let Workspace { attended, residual, delta, normed, gate_up, activated, .. } = &mut **work;
        ops::linear_add_norm(exec, attended, &layer.o, residual, &layer.post_norm, eps, delta, normed)?;
        ops::linear_swiglu(exec, normed, &layer.gate_up, gate_up, activated)?;
        ops::linear_add_norm(exec, activated, &layer.down, residual, next, eps, delta, normed)
    }
}

/// The heads of a layer, for the tokens of a step.
fn heads<'a>(config: &Config, layer: &'a Layer, rope: &'a Tensor, inputs: &'a Inputs) -> Heads<'a> {
    let (norms, eps) = ((&layer.q_norm, &layer.k_norm), config.rms_norm_eps);
    Heads { shape: config.shape, norms, eps, rope, positions: &inputs.positions, slots: &inputs.slots }
}
