//! The interface that a model crate implements; the rest of the runtime is generic over it.

use super::bounds::Bounds;
use super::config_file::{ConfigError, ConfigFile, Overrides};
use super::draft_method::{check_drafts, overrides};
use super::expert_readback::ExpertLayers;
use super::inputs::Inputs;
use super::load_error::LoadError;
use super::load_options::LoadOptions;
use super::lora::Adapters;
use super::model_info::ModelInfo;
use super::pass_kind::PassKind;
use super::projection_source::LayerSources;
use super::tensor_hash::hash_rows;
use pegainfer_core::exec::Exec;
use pegainfer_core::parallel::{Communicator, Shard};
use pegainfer_core::schedule::{SampleRow, SequenceState, Step};
use pegainfer_core::tensor::{OpError, Tensor};
use pegainfer_core::weights::{Checkpoint, Loader, WeightsError};
use pegainfer_kernels::choice;
use pegainfer_kernels::ops::{self, BLOCK_SIZE, Matrix};
use pegainfer_kernels::sources::Family;
use std::fmt::Debug;
use std::path::Path;

/// Step type of a model, whose [`Model::State`] defines the data of a step other than tokens and KV blocks.
pub type StepOf<M> = Step<<<M as Model>::State as SequenceState>::Row>;

/// A model family: configuration, weights, state and forward pass. [`load`](super::load()) builds an engine from it,
/// [`record_step`](super::record_step) its kernel plan; [`Executor`](super::Executor) runs its steps.
pub trait Model: Debug + Sized + Send + 'static {
    /// Name of the family in messages.
    const NAME: &'static str;
    /// Names in `architectures` of config.json, each with its `model_type`.
    const ARCHITECTURES: &'static [(&'static str, &'static str)];
    /// True if its checkpoints have layers that draft (multi-token prediction).
    const DRAFTS: bool = false;
    /// Kernels that its steps run.
    const FAMILY: Family = Family::Qwen;
    /// Tokens of a KV block.
    const BLOCK_TOKENS: usize = BLOCK_SIZE;
    /// True if the launches of a pass depend only on its numbers of rows, tokens and samples, unless
    /// [`is_prompt_step`](super::is_prompt_step). Steps that verify drafts then run as CUDA graphs, too.
    const SHAPED_GRAPHS: bool = false;

    /// Options of loading that only this model has.
    type Options: Debug + Clone + Default;
    /// The numbers of config.json.
    type Config: Debug + Clone + Send + Sync + 'static;
    /// Loaded weights on the device.
    type Weights: Debug + Send + Sync;
    /// Activations, the model's own step inputs and tables, allocated once for the largest step.
    type Workspace: Debug + Send;
    /// Device state that outlives a step: the KV cache and other state.
    type Cache: Debug + Send;
    /// State that the scheduler manages together with KV blocks; `()` for a model with all state in KV blocks.
    type State: SequenceState;

    /// Reads config.json; refuses unsupported fields by name.
    fn config(file: ConfigFile) -> Result<Self::Config, ConfigError>;

    /// The numbers that the runtime needs.
    fn info(config: &Self::Config) -> ModelInfo;

    /// The numbers of the model as rank `shard` has them: its share of heads, of the width of the MLP, and so on. The
    /// workspace, the cache and the forward pass of a rank use these. The error, a sentence for the user, says what the
    /// ranks cannot share. Default: a model that runs on one device.
    fn shard(config: &Self::Config, shard: Shard) -> Result<Self::Config, String> {
        match shard.ranks {
            1 => Ok(config.clone()),
            _ => Err(format!("{} runs on one device", Self::NAME)),
        }
    }

    /// Purpose of tensors that the engine skips, such as "the image encoder"; `None` for tensors that should be loaded.
    fn skipped(_name: &str) -> Option<&'static str> {
        None
    }

    /// Loads the weights of a rank with these numbers. With several ranks it runs twice, first on `Meta`, and requests
    /// the same tensors both times; see [`Loader::run_ranks`].
    fn weights(loader: &mut Loader<'_>, config: &Self::Config) -> Result<Self::Weights, WeightsError>;

    /// Prepares the device of a rank, and computes weights from loaded ones. Default: nothing.
    fn finish_weights(_exec: &mut Exec, _weights: &mut Self::Weights, _config: &Self::Config) -> Result<(), LoadError> {
        Ok(())
    }

    /// The projections of each layer that adapters may change, with the rows and columns that a rank with these numbers
    /// has. The error, a sentence for the user, says why there are none. Default: none.
    fn adapted(_config: &Self::Config) -> Result<Vec<LayerSources>, String> {
        Err(format!("{} takes no LoRA adapters", Self::NAME))
    }

    /// Allocates the workspace.
    fn workspace(exec: &mut Exec, config: &Self::Config, bounds: &Bounds) -> std::io::Result<Self::Workspace>;

    /// Allocates the KV cache of `blocks` blocks, and `bounds.slots` state slots. Runs last, because the cache gets the
    /// rest of a GPU's memory.
    fn cache(parts: Parts<'_, Self>, bounds: &Bounds, blocks: usize) -> Result<Self::Cache, LoadError>;

    /// The scheduler's side of the state.
    fn state(config: &Self::Config, bounds: &Bounds) -> Self::State;

    /// Appends the state rows, from row `first` on, of a step without a scheduler: warm-up, plans, and rows that pad a
    /// graph, which attend to nothing. Default: none.
    fn add_state_rows(_step: &mut StepOf<Self>, _first: usize) {}

    /// Appends the state rows of a pass of the layers that draft after `step`: row `i` of the pass continues row
    /// `rows[i]` of the step, or attends to nothing. Default: none.
    fn add_draft_rows(_pass: &mut StepOf<Self>, _step: &StepOf<Self>, _rows: &[usize]) {}

    /// Prepares the workspace for a step: rows of its tensors, and the model's own inputs. Runs before each step,
    /// outside of CUDA graphs.
    fn begin(pass: &mut Pass<'_, Self>) -> Result<(), OpError>;

    /// Launches the ops of a step, from token ids to the normalised output of the last layer for the sampled tokens, in
    /// order; see [`output`](Self::output). Must not wait for the device.
    fn forward(pass: &mut Pass<'_, Self>) -> Result<(), OpError>;

    /// Result of [`forward`](Self::forward), `[samples, hidden]` bf16, and the output matrix that computes logits from
    /// it, `[vocab, hidden]`, or this rank's rows of it.
    fn output<'a>(work: &'a mut Self::Workspace, weights: &'a Self::Weights) -> (&'a mut Tensor, &'a Matrix);

    /// The experts whose choices are counted; `None` for a model without experts. Default: `None`.
    fn expert_layers(_config: &Self::Config) -> Option<ExpertLayers> {
        None
    }

    /// The experts that layer number `layer` of [`expert_layers`](Self::expert_layers) chose for the first `tokens`
    /// tokens of the last step, `[tokens, per_token]` u32.
    fn chosen_experts(_work: &mut Self::Workspace, _layer: usize, _tokens: usize) -> Option<&Tensor> {
        None
    }

    /// Logits, `[samples, vocab]` f32, of some rows of [`output`](Self::output) and (a part of) its matrix.
    fn project(exec: &mut Exec, normed: &Tensor, head: &Matrix, logits: &mut Tensor) -> Result<(), OpError> {
        ops::linear(exec, normed, head, logits)
    }

    /// Prepares the workspace for a pass of the layers that draft; see [`draft`](Self::draft).
    fn begin_draft(pass: &mut Pass<'_, Self>) -> Result<(), OpError> {
        Err(no_drafts::<Self>(pass.kind))
    }

    /// Launches the layers that draft, if [`ModelInfo::drafts`] says that they are loaded. Must not wait for the
    /// device.
    ///
    /// [`PassKind::Drafts`] (multi-token prediction): input is the token *after* each one of the step, and a hidden
    /// state for it. In the first pass over a step that is the normalised output of the last layer, for all tokens. In
    /// later passes (`again`) it is the output of the previous pass for its samples, each of which is now a row.
    /// Output: the sampled tokens, in order; see [`draft_output`](Self::draft_output). Keys and values go to the step's
    /// slots in a cache of these layers.
    ///
    /// [`PassKind::Blocks`]: input is the blocks after a step, see [`ModelInfo::draft_block`]. Output: the same.
    fn draft(pass: &mut Pass<'_, Self>) -> Result<(), OpError> {
        Err(no_drafts::<Self>(pass.kind))
    }

    /// Result of [`draft`](Self::draft), in the form of [`output`](Self::output).
    fn draft_output<'a>(work: &'a mut Self::Workspace, weights: &'a Self::Weights) -> (&'a mut Tensor, &'a Matrix) {
        Self::output(work, weights)
    }

    /// In a pass over blocks, adds the part that depends on the previous token to the `logits` of one position of each
    /// block, `[rows, vocab]` f32. `previous`: tokens of the previous position, `[rows]` u32; `None` at the first
    /// position. Default: nothing.
    fn add_transition(
        _exec: &mut Exec,
        _parts: (&mut Self::Workspace, &Self::Weights),
        _previous: Option<&Tensor>,
        _logits: &mut Tensor,
    ) -> Result<(), OpError> {
        Ok(())
    }

    /// Rows, as for [`ragged`], of the steps that load kernels and autotune, so that they do not delay the first
    /// requests; none on other devices than GPUs. `largest`: rows of the largest decode step, and tokens of the largest
    /// prompt. `mixed_tokens`: tokens of a step with many decoding sequences and a few prompts.
    fn warm_up(
        exec: &mut Exec,
        _bounds: &Bounds,
        largest: (usize, usize),
        mixed_tokens: usize,
    ) -> Result<Vec<Vec<(usize, usize)>>, OpError> {
        choice::warm_up(exec, mixed_tokens, largest)
    }

    /// Changes the numbers of a rank for the steps of the warm-up, such as the number of layers that run.
    fn begin_warm_up(_config: &mut Self::Config) {}

    /// Takes the changes of [`begin_warm_up`](Self::begin_warm_up) back, and prepares the device of a rank for steps of
    /// up to `tokens` tokens.
    fn end_warm_up(_exec: &mut Exec, _config: &mut Self::Config, _tokens: usize) -> Result<(), OpError> {
        Ok(())
    }

    /// Hashes of what all ranks hold in the same bits after a step, and what that is, for `--check-ranks`. Default: the
    /// output of the last layer for the sampled tokens. It is the sum of what all layers added to the residual stream.
    fn hashes(pass: &mut Pass<'_, Self>) -> Result<Vec<(String, u64)>, OpError> {
        let Pass { exec, weights, work, step, .. } = pass;
        let normed = Self::output(work, weights).0;
        let rows = step.samples.len().min(normed.rows_cols().0);
        Ok(vec![("the output of the last layer".to_owned(), hash_rows(exec, normed, 0..rows, 0)?)])
    }

    /// The tensors of the cache that steps read through block tables, each with blocks as its first dimension, and
    /// those that they read through state slots, with slots as theirs. `None` if copies of these are not enough to
    /// resume.
    fn kept_tensors(cache: &mut Self::Cache) -> Option<KeptTensors<'_>> {
        let _ = cache;
        None
    }

    /// Checks that a checkpoint has the tensors that `config` asks for, before any is loaded.
    fn check_checkpoint(config: &Self::Config, checkpoint: &Checkpoint) -> Result<(), LoadError> {
        let info = Self::info(config);
        checkpoint.check_block_scales(info.fp8_weights)?;
        check_drafts(info.drafts, checkpoint.names())
    }

    /// Loads the configuration with the user's options.
    fn load_config_for(options: &LoadOptions<Self::Options>) -> Result<Self::Config, LoadError> {
        let overrides = overrides(options, (Self::NAME, Self::DRAFTS))?;
        Ok(Self::load_config_with(&options.model_path, &overrides)?)
    }

    /// Reads the configuration of the checkpoint in `dir`.
    fn load_config(dir: &Path) -> Result<Self::Config, ConfigError> {
        Self::load_config_with(dir, &Overrides::default())
    }

    /// Loads the configuration with the changes of the user's flags.
    fn load_config_with(dir: &Path, overrides: &Overrides) -> Result<Self::Config, ConfigError> {
        Self::config(ConfigFile::read(dir, Self::NAME)?.with(overrides.clone()))
    }

    /// Reads the text of a config.json.
    fn parse_config(text: &str) -> Result<Self::Config, ConfigError> {
        Self::config(ConfigFile::parse(text, Self::NAME)?)
    }
}

/// What is copied of a model's cache.
#[derive(Debug, Default)]
pub struct KeptTensors<'a> {
    /// Each `[blocks, ..]`.
    pub blocks: Vec<&'a mut Tensor>,
    /// Each `[slots, ..]`; empty if all state is in blocks.
    pub states: Vec<&'a mut Tensor>,
}

/// Parts of a model that exist when its [`Model::cache`] is allocated.
#[derive(Debug)]
pub struct Parts<'a, M: Model> {
    /// The device.
    pub exec: &'a mut Exec,
    /// The model's numbers.
    pub config: &'a M::Config,
    /// Weights.
    pub weights: &'a M::Weights,
    /// Workspace.
    pub work: &'a M::Workspace,
    /// The rank.
    pub shard: Shard,
}

/// The borrowed parts of one step.
#[derive(Debug)]
pub struct Pass<'a, M: Model> {
    /// The device.
    pub exec: &'a mut Exec,
    /// The model's numbers.
    pub config: &'a M::Config,
    /// Weights.
    pub weights: &'a M::Weights,
    /// KV cache and state.
    pub cache: &'a mut M::Cache,
    /// Activations.
    pub work: &'a mut M::Workspace,
    /// The step's metadata on the device.
    pub inputs: &'a mut Inputs,
    /// Tokens that the previous step sampled, `[rows]` u32: placeholder ids among the inputs stand for them.
    pub previous: &'a Tensor,
    /// The step.
    pub step: &'a StepOf<M>,
    /// Adapters of the step's rows, if any has one.
    pub adapters: Option<Adapters<'a>>,
    /// The layers that run.
    pub kind: PassKind,
    /// The other ranks, if there are any.
    pub communicator: Option<&'a dyn Communicator>,
}

/// Error of a model that has no layers for passes of this kind.
fn no_drafts<M: Model>(kind: PassKind) -> OpError {
    OpError { op: "draft", message: format!("{} has no layers for {kind:?}", M::NAME) }
}

/// Maximum number of ranks that are suggested: GPUs of one machine.
const MAX_RANKS: usize = 8;

/// [`Model::shard`], whose refusal lists the numbers of ranks that can share the model.
pub(super) fn shard_config<M: Model>(config: &M::Config, shard: Shard) -> Result<M::Config, LoadError> {
    M::shard(config, shard).map_err(|why| {
        let possible: Vec<String> = possible_ranks::<M>(config).map(|n| n.to_string()).collect();
        LoadError::Option(format!("{why}: --tensor-parallel-size takes {} here", possible.join(", ")))
    })
}

/// Numbers of ranks that can share a model, ascending.
pub(super) fn possible_ranks<M: Model>(config: &M::Config) -> impl Iterator<Item = usize> {
    (1..=MAX_RANKS).filter(|ranks| M::shard(config, Shard { rank: 0, ranks: *ranks }).is_ok())
}

/// A step for warm-up, plans, benchmarks and tests, without a scheduler. Each of `rows` is (new tokens, context with
/// these), and samples once. Blocks and state slots are numbered consecutively.
pub fn ragged<M: Model>(rows: &[(usize, usize)]) -> StepOf<M> {
    let mut step = Step::ragged(M::BLOCK_TOKENS, rows);
    M::add_state_rows(&mut step, 0);
    step
}

/// [`ragged`] step of `batch` equal rows that each add `tokens` tokens to `context - tokens` cached ones.
pub fn uniform<M: Model>(batch: usize, tokens: usize, context: usize) -> StepOf<M> {
    ragged::<M>(&vec![(tokens, context); batch])
}

/// A step of `batch` rows that each add their newest token and verify `verified` drafts after it, in contexts of
/// `context` tokens. Every token is sampled, and `wanted` drafts are requested. For warm-ups.
pub(super) fn speculative<M: Model>(batch: usize, (verified, wanted): (usize, usize), context: usize) -> StepOf<M> {
    let tokens = 1 + verified;
    let mut step = uniform::<M>(batch, tokens, context.max(tokens));
    for row in &mut step.rows {
        (row.drafts, row.model_drafts) = (verified, wanted);
    }
    let sample = |token: u32| SampleRow { token, ..step.samples[token as usize / tokens].clone() };
    step.samples = (0..step.tokens.len() as u32).map(sample).collect();
    step
}

/// `step` padded to `rows` rows for a CUDA graph; the added rows attend to nothing.
pub fn padded<M: Model>(step: &StepOf<M>, rows: usize) -> StepOf<M> {
    let mut padded = step.padded(rows);
    M::add_state_rows(&mut padded, step.rows.len());
    padded
}
