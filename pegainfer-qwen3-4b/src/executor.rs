//! Runs a step: the Qwen3 forward pass, written once over ops.
//!
//! A step is launched and finished: on a GPU `launch` only enqueues it, and the next one may be launched before the host
//! has seen the tokens of this one. They stay on the device, where [`FROM_PREVIOUS`](crate::plan::FROM_PREVIOUS) finds
//! them; a copy of them is on its way to the host.

use crate::config::Config;
use crate::plan::{Outcome, SampleRow, Step};
use crate::state::{KvLayer, allocate_kv};
use crate::weights::{Layer, Weights};
use pegainfer_core::engine::TokenLogprobs;
use pegainfer_core::exec::{Device, Exec};
use pegainfer_core::readback::Readback;
use pegainfer_core::record::OpRecord;
use pegainfer_core::tensor::{DType, OpError, Tensor};
use pegainfer_kernels::ops::{self, AttentionBatch, LogprobRow, SampleSpec};

/// Rows of logits computed at once: more rows take more memory (0.6 MB each for Qwen3's vocabulary), fewer stream the
/// output matrix more often.
const LOGITS_ROWS: usize = 32;
/// Steps that may be launched and not finished.
pub const STEPS_IN_FLIGHT: usize = 2;

/// Largest step an executor is built for.
#[derive(Debug, Clone, Copy)]
pub struct StepBounds {
    /// Input tokens.
    pub tokens: usize,
    /// Rows.
    pub rows: usize,
    /// Tokens of context.
    pub context: usize,
    /// KV blocks of the pool.
    pub kv_blocks: usize,
}

/// Model, KV cache and workspace on one device.
#[derive(Debug)]
pub struct Executor {
    exec: Exec,
    config: Config,
    weights: Weights,
    kv: Vec<KvLayer>,
    rope: Tensor,
    inputs: Inputs,
    work: Workspace,
    /// Used in turn.
    results: [Results; STEPS_IN_FLIGHT],
    /// Steps so far.
    launched: usize,
    /// Steps so far.
    finished: usize,
}

/// What a step in flight leaves for the host.
#[derive(Debug)]
struct Results {
    /// The sampled tokens.
    readback: Readback,
    /// One for each sample row.
    logprobs: Vec<Option<TokenLogprobs>>,
}

/// The step's metadata on the device.
#[derive(Debug)]
struct Inputs {
    tokens: Tensor,
    positions: Tensor,
    slots: Tensor,
    qo_indptr: Tensor,
    kv_lens: Tensor,
    block_tables: Tensor,
    /// Rows that need logits, all samples of the step.
    sample_rows: Tensor,
}

/// Activations, allocated once for the largest step.
#[derive(Debug)]
struct Workspace {
    /// The residual stream, `[tokens, hidden]`.
    residual: Tensor,
    /// Its normalised value, input of the projections, `[tokens, hidden]`.
    normed: Tensor,
    /// Output of a block, to be added to the residual, `[tokens, hidden]`.
    delta: Tensor,
    /// `[tokens, (heads + 2 kv_heads) * head_dim]`.
    qkv: Tensor,
    /// `[tokens, heads * head_dim]`.
    q: Tensor,
    /// `[tokens, heads * head_dim]`.
    attended: Tensor,
    /// `[tokens, 2 * intermediate]`.
    gate_up: Tensor,
    /// `[tokens, intermediate]`.
    activated: Tensor,
    /// Rows that need logits, `[LOGITS_ROWS, hidden]`.
    last: Tensor,
    /// `[LOGITS_ROWS, vocab]` f32.
    logits: Tensor,
    /// What the samples of the last step drew, `[rows]` u32. At its full length outside of `Pass::sample`.
    sampled: Tensor,
}

impl Executor {
    /// Allocates KV and workspace beside loaded weights.
    pub fn new(mut exec: Exec, config: Config, weights: Weights, bounds: StepBounds) -> std::io::Result<Self> {
        let kv = allocate_kv(&mut exec, &config, bounds.kv_blocks)?;
        let rope = ops::rope_table(&mut exec, bounds.context, config.shape.head_dim, config.rope_theta)?;
        let inputs = Inputs::new(&mut exec, bounds)?;
        let work = Workspace::new(&mut exec, &config, bounds)?;
        let results = [Results::new(&mut exec, bounds.rows)?, Results::new(&mut exec, bounds.rows)?];
        Ok(Self { exec, config, weights, kv, rope, inputs, work, results, launched: 0, finished: 0 })
    }

    /// The execution context, to record or to ask about the device.
    pub fn exec(&mut self) -> &mut Exec {
        &mut self.exec
    }

    /// The model's numbers.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Steps that it helps to have in flight: a device that computes beside the host can have the next one waiting.
    pub fn useful_depth(&self) -> usize {
        if self.exec.device() == Device::Cuda { STEPS_IN_FLIGHT } else { 1 }
    }

    /// Starts a step; at most [`STEPS_IN_FLIGHT`] may be in flight. The CPU computes at once.
    pub fn launch(&mut self, step: &Step) -> Result<(), OpError> {
        assert!(self.launched - self.finished < STEPS_IN_FLIGHT, "too many steps in flight");
        let Self { exec, config, weights, kv, rope, inputs, work, results, .. } = self;
        let results = &mut results[self.launched % STEPS_IN_FLIGHT];
        exec.install(|exec| Pass { exec, config, weights, rope, inputs, work, step, results }.run(kv))??;
        self.launched += 1;
        Ok(())
    }

    /// Waits for the oldest step in flight. On `Meta` the outcome has no tokens.
    pub fn finish(&mut self) -> Result<Outcome, OpError> {
        assert!(self.finished < self.launched, "no step is in flight");
        let results = &mut self.results[self.finished % STEPS_IN_FLIGHT];
        let tokens = results.readback.wait()?.tensor(0).to_vec();
        self.finished += 1;
        Ok(Outcome { tokens, logprobs: std::mem::take(&mut results.logprobs) })
    }

    /// Forgets every step in flight, once the device is done with them; an error says that the device is lost.
    pub fn abandon(&mut self) -> Result<(), OpError> {
        self.finished = self.launched;
        self.exec.synchronize()
    }

    /// Launches one step and waits for it.
    pub fn run(&mut self, step: &Step) -> Result<Outcome, OpError> {
        self.launch(step)?;
        self.finish()
    }

    /// As [`run`](Self::run), with the record of every op.
    pub fn record(&mut self, step: &Step) -> (Result<Outcome, OpError>, Vec<OpRecord>) {
        self.exec.start_recording();
        let outcome = self.run(step);
        (outcome, self.exec.stop_recording())
    }
}

impl Results {
    fn new(exec: &mut Exec, rows: usize) -> std::io::Result<Self> {
        let bytes = (rows * DType::U32.size()).next_multiple_of(64);
        Ok(Self { readback: Readback::new(exec, bytes)?, logprobs: Vec::new() })
    }
}

/// The borrowed parts of one run.
struct Pass<'a> {
    exec: &'a mut Exec,
    config: &'a Config,
    weights: &'a Weights,
    rope: &'a Tensor,
    inputs: &'a mut Inputs,
    work: &'a mut Workspace,
    step: &'a Step,
    results: &'a mut Results,
}

impl Pass<'_> {
    fn run(&mut self, kv: &mut [KvLayer]) -> Result<(), OpError> {
        self.inputs.fill(self.exec, self.step)?;
        self.work.set_rows(self.step.tokens.len());
        self.forward(kv)?;
        self.sample()
    }

    /// From token ids to the normalised output of the last layer, in `work.normed`.
    fn forward(&mut self, kv: &mut [KvLayer]) -> Result<(), OpError> {
        let (weights, eps) = (self.weights, self.config.rms_norm_eps);
        let Self { exec, inputs, work, .. } = self;
        ops::embedding(exec, &inputs.tokens, &work.sampled, &weights.embedding, &mut work.residual)?;
        ops::rms_norm(exec, &work.residual, &weights.layers[0].input_norm, eps, &mut work.normed)?;
        for (i, (layer, kv)) in weights.layers.iter().zip(kv).enumerate() {
            self.attention(layer, kv)?;
            self.add_norm(&layer.post_norm)?;
            self.mlp(layer)?;
            // The next layer's input norm takes this layer's residual add along.
            self.add_norm(weights.layers.get(i + 1).map_or(&weights.norm, |next| &next.input_norm))?;
        }
        Ok(())
    }

    /// Adds `delta` to the residual stream and normalises it.
    fn add_norm(&mut self, weight: &Tensor) -> Result<(), OpError> {
        let Self { exec, config, work, .. } = self;
        let Workspace { residual, normed, delta, .. } = &mut **work;
        ops::add_rms_norm(exec, delta, residual, weight, config.rms_norm_eps, normed)
    }

    /// `normed` to `delta`.
    fn attention(&mut self, layer: &Layer, kv: &mut KvLayer) -> Result<(), OpError> {
        let Self { exec, config, rope, inputs, work, step, .. } = self;
        let shape = config.shape;
        ops::linear(exec, &work.normed, &layer.qkv, &mut work.qkv)?;
        let norms = (&layer.q_norm, &layer.k_norm);
        let at = (&inputs.positions, &inputs.slots);
        let cache = (&mut kv.k, &mut kv.v);
        ops::qk_norm_rope_write_kv(exec, &work.qkv, norms, rope, at, shape, config.rms_norm_eps, &mut work.q, cache)?;
        let batch = AttentionBatch {
            qo_indptr: &inputs.qo_indptr,
            kv_lens: &inputs.kv_lens,
            block_tables: &inputs.block_tables,
            queries: step.queries(),
            longest: step.kv_lens.iter().copied().max().unwrap_or(0) as usize,
            attended: step.positions.iter().map(|&p| u64::from(p) + 1).sum(),
            cached: step.kv_lens.iter().map(|&n| u64::from(n)).sum(),
        };
        let scale = (shape.head_dim as f32).sqrt().recip();
        ops::attention(exec, &work.q, (&kv.k, &kv.v), &batch, shape, scale, &mut work.attended)?;
        ops::linear(exec, &work.attended, &layer.o, &mut work.delta)
    }

    /// `normed` to `delta`.
    fn mlp(&mut self, layer: &Layer) -> Result<(), OpError> {
        let Self { exec, work, .. } = self;
        ops::linear(exec, &work.normed, &layer.gate_up, &mut work.gate_up)?;
        ops::swiglu(exec, &work.gate_up, &mut work.activated)?;
        ops::linear(exec, &work.activated, &layer.down, &mut work.delta)
    }

    /// Logits and tokens of the rows that want them. The tokens stay on the device and begin their way to the host.
    fn sample(&mut self) -> Result<(), OpError> {
        let Self { exec, weights, inputs, work, step, results, .. } = self;
        results.logprobs.clear();
        for (i, rows) in step.samples.chunks(LOGITS_ROWS).enumerate() {
            for tensor in [&mut inputs.sample_rows, &mut work.sampled] {
                tensor.set_range(i * LOGITS_ROWS, rows.len());
            }
            for tensor in [&mut work.last, &mut work.logits] {
                tensor.set_rows(rows.len());
            }
            ops::gather_rows(exec, &work.normed, &inputs.sample_rows, &mut work.last)?;
            ops::linear(exec, &work.last, weights.output(), &mut work.logits)?;
            let specs: Vec<SampleSpec> =
                rows.iter().map(|row| SampleSpec { params: row.params, position: row.position }).collect();
            ops::sample(exec, &work.logits, &specs, &mut work.sampled)?;
            results.logprobs.extend(logprobs(exec, work, rows)?);
        }
        work.sampled.set_rows(step.samples.len());
        results.readback.start(exec, &[&work.sampled])?;
        // The next step may ask for any of them.
        work.sampled.set_rows(work.sampled.max_rows());
        Ok(())
    }
}

/// Log-probabilities of the rows that ask for them; waits for the device if one does.
fn logprobs(exec: &mut Exec, work: &Workspace, rows: &[SampleRow]) -> Result<Vec<Option<TokenLogprobs>>, OpError> {
    let mut reports = vec![None; rows.len()];
    if rows.iter().any(|row| row.logprobs.is_some()) {
        let mut tokens = vec![0u32; rows.len()];
        exec.read(&work.sampled, 0, &mut tokens)?;
        let wanted = rows.iter().zip(tokens).enumerate();
        let wanted: Vec<LogprobRow> =
            wanted.filter_map(|(i, (row, token))| row.logprobs.map(|top| LogprobRow { row: i, token, top })).collect();
        for (row, report) in wanted.iter().zip(ops::logprobs(exec, &work.logits, &wanted)?) {
            reports[row.row] = Some(report);
        }
    }
    Ok(reports)
}

impl Inputs {
    fn new(exec: &mut Exec, bounds: StepBounds) -> std::io::Result<Self> {
        let max_blocks = bounds.context.div_ceil(pegainfer_core::kv::BLOCK_SIZE);
        let names = ["tokens", "positions", "slots", "qo_indptr", "kv_lens", "sample_rows"];
        let longest = bounds.tokens.max(bounds.rows + 1);
        let [tokens, positions, slots, qo_indptr, kv_lens, sample_rows] = exec.adjacent(names, longest, DType::U32)?;
        let block_tables = exec.tensor("block_tables", &[bounds.rows, max_blocks], DType::U32)?;
        Ok(Self { tokens, positions, slots, qo_indptr, kv_lens, block_tables, sample_rows })
    }

    fn fill(&mut self, exec: &mut Exec, step: &Step) -> Result<(), OpError> {
        let sample_rows: Vec<u32> = step.samples.iter().map(|sample| sample.token).collect();
        let Self { tokens, positions, slots, qo_indptr, kv_lens, block_tables, sample_rows: rows } = self;
        exec.fill_adjacent(
            [tokens, positions, slots, qo_indptr, kv_lens, rows],
            [&step.tokens, &step.positions, &step.slots, &step.qo_indptr, &step.kv_lens, &sample_rows],
        )?;
        // Rows of the device's table are as wide as the longest context; what lies behind a row's blocks is not read.
        block_tables.set_rows(step.rows.len());
        exec.fill_columns(block_tables, step.max_blocks, &step.block_tables)
    }
}

impl Workspace {
    fn new(exec: &mut Exec, config: &Config, bounds: StepBounds) -> std::io::Result<Self> {
        let tokens = bounds.tokens;
        let mut bf16 = |name: &str, width: usize| exec.tensor(name, &[tokens, width], DType::Bf16);
        let (hidden, width, shape) = (config.hidden_size, config.intermediate_size, config.shape);
        Ok(Self {
            residual: bf16("residual", hidden)?,
            normed: bf16("normed", hidden)?,
            delta: bf16("delta", hidden)?,
            qkv: bf16("qkv", shape.qkv_width())?,
            q: bf16("q", shape.q_width())?,
            attended: bf16("attended", shape.q_width())?,
            gate_up: bf16("gate_up", 2 * width)?,
            activated: bf16("activated", width)?,
            last: exec.tensor("last", &[LOGITS_ROWS, hidden], DType::Bf16)?,
            logits: exec.tensor("logits", &[LOGITS_ROWS, config.vocab_size], DType::F32)?,
            sampled: exec.tensor("sampled", &[bounds.rows], DType::U32)?,
        })
    }

    fn set_rows(&mut self, tokens: usize) {
        let Self { residual, normed, delta, qkv, q, attended, gate_up, activated, .. } = self;
        for tensor in [residual, normed, delta, qkv, q, attended, gate_up, activated] {
            tensor.set_rows(tokens);
        }
    }
}
