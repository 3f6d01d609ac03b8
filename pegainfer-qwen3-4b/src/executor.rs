//! Runs a step: the Qwen3 forward pass, written once over ops.

use crate::config::Config;
use crate::plan::{Outcome, SampleRow, Step};
use crate::state::{KvLayer, allocate_kv};
use crate::weights::{Layer, Weights};
use pegainfer_core::exec::Exec;
use pegainfer_core::record::OpRecord;
use pegainfer_core::tensor::{DType, OpError, Tensor};
use pegainfer_kernels::ops::{self, AttentionBatch, DRAW_WORDS, Draw, REPORT_WORDS};

/// Rows of logits computed at once: more rows take more memory (0.6 MB each for Qwen3's vocabulary), fewer stream the
/// output matrix more often.
const LOGITS_ROWS: usize = 32;

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
    sample_rows: Tensor,
    draws: Tensor,
}

/// Activations, allocated once for the largest step.
#[derive(Debug)]
struct Workspace {
    /// The residual stream, `[tokens, hidden]`.
    residual: Tensor,
    /// Its normalised value, input of the projections, `[tokens, hidden]`.
    normed: Tensor,
    /// Room for the output of a block before it is added to the residual, `[tokens, hidden]`.
    delta: Tensor,
    /// `[tokens, (heads + 2 kv_heads) * head_dim]`.
    qkv: Tensor,
    /// `[tokens, heads * head_dim]`.
    q: Tensor,
    /// `[tokens, heads * head_dim]`.
    attended: Tensor,
    /// Room for the MLP's products, `[tokens, 2 * intermediate]`.
    gate_up: Tensor,
    /// `[tokens, intermediate]`.
    activated: Tensor,
    /// Rows that need logits, `[LOGITS_ROWS, hidden]`.
    last: Tensor,
    /// `[LOGITS_ROWS, vocab]` f32.
    logits: Tensor,
    /// `[LOGITS_ROWS]` u32.
    sampled: Tensor,
    /// Of the sampled tokens, `[LOGITS_ROWS, REPORT_WORDS]` u32.
    logprobs: Tensor,
}

impl Executor {
    /// Allocates KV and workspace beside loaded weights.
    pub fn new(mut exec: Exec, config: Config, weights: Weights, bounds: StepBounds) -> std::io::Result<Self> {
        let kv = allocate_kv(&mut exec, &config, bounds.kv_blocks)?;
        let rope = ops::rope_table(&mut exec, bounds.context, config.shape.head_dim, config.rope_theta)?;
        let inputs = Inputs::new(&mut exec, bounds)?;
        let work = Workspace::new(&mut exec, &config, bounds.tokens)?;
        Ok(Self { exec, config, weights, kv, rope, inputs, work })
    }

    /// The execution context, to record or to ask about the device.
    pub fn exec(&mut self) -> &mut Exec {
        &mut self.exec
    }

    /// The model's numbers.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Runs one step. On `Meta` the outcome is empty.
    pub fn run(&mut self, step: &Step) -> Result<Outcome, OpError> {
        let Self { exec, config, weights, kv, rope, inputs, work } = self;
        exec.install(|exec| Pass { exec, config, weights, rope, inputs, work, step }.run(kv))?
    }

    /// As [`run`](Self::run), with the record of every op.
    pub fn record(&mut self, step: &Step) -> (Result<Outcome, OpError>, Vec<OpRecord>) {
        let Self { exec, config, weights, kv, rope, inputs, work } = self;
        let pass = |exec: &mut Exec| Pass { exec, config, weights, rope, inputs, work, step }.run(kv);
        match exec.install(|exec| exec.recording(pass)) {
            Ok(recorded) => recorded,
            Err(error) => (Err(error), Vec::new()),
        }
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
}

impl Pass<'_> {
    fn run(&mut self, kv: &mut [KvLayer]) -> Result<Outcome, OpError> {
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
            // The MLP's end takes the next layer's input norm along.
            self.mlp(layer, weights.layers.get(i + 1).map_or(&weights.norm, |next| &next.input_norm))?;
        }
        Ok(())
    }

    /// The first half of a layer: `normed` becomes the input of the MLP.
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
        let Workspace { attended, residual, delta, normed, .. } = &mut **work;
        ops::linear_add_norm(exec, attended, &layer.o, residual, &layer.post_norm, config.rms_norm_eps, delta, normed)
    }

    /// The second half: `normed` becomes the residual stream under the norm that comes `next`.
    fn mlp(&mut self, layer: &Layer, next: &Tensor) -> Result<(), OpError> {
        let Self { exec, config, work, .. } = self;
        let Workspace { residual, delta, normed, gate_up, activated, .. } = &mut **work;
        ops::linear_swiglu(exec, normed, &layer.gate_up, gate_up, activated)?;
        ops::linear_add_norm(exec, activated, &layer.down, residual, next, config.rms_norm_eps, delta, normed)
    }

    /// Logits, tokens and log-probabilities of the rows that want them.
    fn sample(&mut self) -> Result<Outcome, OpError> {
        let mut outcome = Outcome::default();
        for rows in self.step.samples.chunks(LOGITS_ROWS) {
            self.draw(rows)?;
            self.read_samples(rows, &mut outcome)?;
        }
        Ok(outcome)
    }

    /// `normed` to `logits`, `sampled` and `logprobs` of at most `LOGITS_ROWS` rows. Does not wait for a GPU.
    fn draw(&mut self, rows: &[SampleRow]) -> Result<(), OpError> {
        let Self { exec, weights, inputs, work, .. } = self;
        let indices: Vec<u32> = rows.iter().map(|row| row.token).collect();
        let draws: Vec<u32> =
            rows.iter().flat_map(|row| Draw::new(&row.params, row.position, row.logprobs).words()).collect();
        exec.fill_rows(&mut inputs.sample_rows, &indices)?;
        exec.fill_rows(&mut inputs.draws, &draws)?;
        for tensor in [&mut work.last, &mut work.logits, &mut work.sampled, &mut work.logprobs] {
            tensor.set_rows(rows.len());
        }
        ops::gather_rows(exec, &work.normed, &inputs.sample_rows, &mut work.last)?;
        ops::linear(exec, &work.last, weights.output(), &mut work.logits)?;
        ops::sample(exec, &work.logits, &inputs.draws, &mut work.sampled)?;
        if rows.iter().any(|row| row.logprobs.is_some()) {
            ops::logprobs(exec, &work.logits, &inputs.draws, &work.sampled, &mut work.logprobs)?;
        }
        Ok(())
    }

    /// Waits for what [`draw`](Self::draw) gave for `rows`, and appends it.
    fn read_samples(&mut self, rows: &[SampleRow], outcome: &mut Outcome) -> Result<(), OpError> {
        let (mut tokens, mut reports) = (vec![0u32; rows.len()], vec![0u32; rows.len() * REPORT_WORDS]);
        self.exec.read(&self.work.sampled, 0, &mut tokens)?;
        if rows.iter().any(|row| row.logprobs.is_some()) {
            self.exec.read(&self.work.logprobs, 0, &mut reports)?;
        }
        outcome.tokens.extend(tokens);
        let reports = rows.iter().zip(reports.chunks_exact(REPORT_WORDS));
        outcome.logprobs.extend(reports.map(|(row, report)| Some(ops::token_logprobs(report, row.logprobs?))));
        Ok(())
    }
}

impl Inputs {
    fn new(exec: &mut Exec, bounds: StepBounds) -> std::io::Result<Self> {
        let max_blocks = bounds.context.div_ceil(pegainfer_core::kv::BLOCK_SIZE);
        let mut ids = |name: &str, shape: &[usize]| exec.tensor(name, shape, DType::U32);
        Ok(Self {
            tokens: ids("tokens", &[bounds.tokens])?,
            positions: ids("positions", &[bounds.tokens])?,
            slots: ids("slots", &[bounds.tokens])?,
            qo_indptr: ids("qo_indptr", &[bounds.rows + 1])?,
            kv_lens: ids("kv_lens", &[bounds.rows])?,
            block_tables: ids("block_tables", &[bounds.rows, max_blocks])?,
            sample_rows: ids("sample_rows", &[LOGITS_ROWS])?,
            draws: ids("draws", &[LOGITS_ROWS, DRAW_WORDS])?,
        })
    }

    fn fill(&mut self, exec: &mut Exec, step: &Step) -> Result<(), OpError> {
        exec.fill_rows(&mut self.tokens, &step.tokens)?;
        exec.fill_rows(&mut self.positions, &step.positions)?;
        exec.fill_rows(&mut self.slots, &step.slots)?;
        exec.fill_rows(&mut self.qo_indptr, &step.qo_indptr)?;
        exec.fill_rows(&mut self.kv_lens, &step.kv_lens)?;
        // Rows of the device's table are as wide as the longest context; what lies behind a row's blocks is not read.
        self.block_tables.set_rows(step.rows.len());
        exec.fill_columns(&mut self.block_tables, step.max_blocks, &step.block_tables)
    }
}

impl Workspace {
    fn new(exec: &mut Exec, config: &Config, tokens: usize) -> std::io::Result<Self> {
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
            sampled: exec.tensor("sampled", &[LOGITS_ROWS], DType::U32)?,
            logprobs: exec.tensor("logprobs", &[LOGITS_ROWS, REPORT_WORDS], DType::U32)?,
        })
    }

    fn set_rows(&mut self, tokens: usize) {
        let Self { residual, normed, delta, qkv, q, attended, gate_up, activated, .. } = self;
        for tensor in [residual, normed, delta, qkv, q, attended, gate_up, activated] {
            tensor.set_rows(tokens);
        }
    }
}
