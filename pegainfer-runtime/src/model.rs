//! What a model crate supplies; the rest of the runtime is written once over it.

use super::bounds::Bounds;
use super::config_file::{ConfigError, ConfigFile, Overrides};
use super::inputs::Inputs;
use super::load_error::LoadError;
use super::model_info::ModelInfo;
use pegainfer_core::exec::Exec;
use pegainfer_core::schedule::{SequenceState, Step};
use pegainfer_core::tensor::{OpError, Tensor};
use pegainfer_core::weights::{Loader, WeightsError};
use pegainfer_kernels::ops::BLOCK_SIZE;
use std::fmt::Debug;
use std::path::Path;

/// The steps of a model: its [`Model::State`] says what a step knows beside tokens and KV blocks.
pub type StepOf<M> = Step<<<M as Model>::State as SequenceState>::Row>;

/// A model family: configuration, weights, state and forward pass. [`load`](super::load()) makes an engine of it,
/// [`record_step`](super::record_step) its kernel plan, [`Executor`](super::Executor) runs its steps.
pub trait Model: Debug + Sized + Send + 'static {
    /// Name of the family in messages.
    const NAME: &'static str;
    /// What `architectures` of config.json calls it.
    const ARCHITECTURE: &'static str;
    /// What `model_type` of config.json calls it.
    const MODEL_TYPE: &'static str;
    /// Whether its checkpoints have layers that draft (multi-token prediction).
    const DRAFTS: bool = false;

    /// The numbers of config.json.
    type Config: Debug + Clone + Send + Sync + 'static;
    /// What is read of the checkpoint, on the device.
    type Weights: Debug + Send + Sync;
    /// Activations, the model's own step inputs and tables: allocated once for the largest step.
    type Workspace: Debug + Send;
    /// What outlives a step on the device: the KV cache, and state beside it.
    type Cache: Debug + Send;
    /// What the scheduler moves with the KV blocks of a sequence; `()` for a model that keeps everything in KV blocks.
    type State: SequenceState;

    /// Reads config.json; refuses by name what the model does not implement.
    fn config(file: ConfigFile) -> Result<Self::Config, ConfigError>;

    /// The numbers that the runtime needs.
    fn info(config: &Self::Config) -> ModelInfo;

    /// What tensors of the checkpoint that the engine does not load are for, such as "the image encoder"; `None` for tensors
    /// that should be loaded.
    fn skipped(_name: &str) -> Option<&'static str> {
        None
    }

    /// Loads the weights.
    fn weights(loader: &mut Loader<'_>, config: &Self::Config) -> Result<Self::Weights, WeightsError>;

    /// Allocates the workspace.
    fn workspace(exec: &mut Exec, config: &Self::Config, bounds: &Bounds) -> std::io::Result<Self::Workspace>;

    /// Allocates the KV cache of `blocks` blocks, and `bounds.slots` slots of state: last of all, because the cache gets
    /// what the rest has left of a GPU.
    fn cache(parts: Parts<'_, Self>, bounds: &Bounds, blocks: usize) -> Result<Self::Cache, LoadError>;

    /// The scheduler's side of the state.
    fn state(config: &Self::Config, bounds: &Bounds) -> Self::State;

    /// Adds the state rows of the rows from `first` on of a step that no scheduler planned: warm-up, plans, and the rows
    /// that pad a graph, which attend to nothing. By default there are none.
    fn add_state_rows(_step: &mut StepOf<Self>, _first: usize) {}

    /// Prepares the workspace for `step`: the rows of its tensors, and the model's own inputs. It runs before each step,
    /// outside of CUDA graphs.
    fn begin(exec: &mut Exec, work: &mut Self::Workspace, step: &StepOf<Self>) -> Result<(), OpError>;

    /// Launches the ops of a step, from token ids to the normalised output of the last layer for the tokens that are
    /// sampled, in order; see [`output`](Self::output). It must not wait for the device.
    fn forward(pass: &mut Pass<'_, Self>) -> Result<(), OpError>;

    /// Where [`forward`](Self::forward) leaves its result, `[samples, hidden]` bf16, and the output matrix that makes
    /// logits of it, `[vocab, hidden]` bf16.
    fn output<'a>(work: &'a mut Self::Workspace, weights: &'a Self::Weights) -> (&'a mut Tensor, &'a Tensor);

    /// Prepares the workspace for a pass of the layers that draft over `step`; see [`draft`](Self::draft).
    fn begin_draft(_exec: &mut Exec, _work: &mut Self::Workspace, _step: &StepOf<Self>) -> Result<(), OpError> {
        Ok(())
    }

    /// Launches the layers that draft (multi-token prediction), where [`ModelInfo::drafts`] says that they are loaded: from the token
    /// *behind* each one of the step, and what the pass before has computed of that one, to the output for the tokens that are
    /// sampled, in order; see [`draft_output`](Self::draft_output). In the first pass over a step the latter is the normalised
    /// output of the last layer, of all tokens; in those that follow, the output of the pass before, of its samples, each of
    /// which is a row now. Keys and values go where the step says, in a cache of these layers. It must not wait for the
    /// device.
    fn draft(_pass: &mut Pass<'_, Self>) -> Result<(), OpError> {
        Err(OpError { op: "draft", message: format!("{} has no layers that draft", Self::NAME) })
    }

    /// As [`output`](Self::output), of [`draft`](Self::draft).
    fn draft_output<'a>(work: &'a mut Self::Workspace, weights: &'a Self::Weights) -> (&'a mut Tensor, &'a Tensor) {
        Self::output(work, weights)
    }

    /// Reads the configuration of the checkpoint in `dir`.
    fn load_config(dir: &Path) -> Result<Self::Config, ConfigError> {
        Self::load_config_with(dir, &Overrides::default())
    }

    /// The same, as the user's flags change it.
    fn load_config_with(dir: &Path, overrides: &Overrides) -> Result<Self::Config, ConfigError> {
        Self::config(ConfigFile::read(dir, Self::NAME)?.with(overrides.clone()))
    }

    /// Reads the text of a config.json.
    fn parse_config(text: &str) -> Result<Self::Config, ConfigError> {
        Self::config(ConfigFile::parse(text, Self::NAME)?)
    }
}

/// What a model has when its [`Model::cache`] is allocated.
#[derive(Debug)]
pub struct Parts<'a, M: Model> {
    /// The device.
    pub exec: &'a mut Exec,
    /// The model's numbers.
    pub config: &'a M::Config,
    /// Its weights.
    pub weights: &'a M::Weights,
    /// Its workspace.
    pub work: &'a M::Workspace,
}

/// The borrowed parts of one step.
#[derive(Debug)]
pub struct Pass<'a, M: Model> {
    /// The device.
    pub exec: &'a mut Exec,
    /// The model's numbers.
    pub config: &'a M::Config,
    /// Its weights.
    pub weights: &'a M::Weights,
    /// KV cache and state.
    pub cache: &'a mut M::Cache,
    /// Activations.
    pub work: &'a mut M::Workspace,
    /// The step's metadata on the device.
    pub inputs: &'a Inputs,
    /// Tokens that the step before sampled, `[rows]` u32: placeholder ids among the inputs stand for them.
    pub previous: &'a Tensor,
    /// The step.
    pub step: &'a StepOf<M>,
}

/// A step of `rows`, of tokens that a row adds and of its context, these included; each samples once. Blocks and state
/// slots are numbered through. For warm-up, plans, benchmarks and tests: no scheduler is asked.
pub fn ragged<M: Model>(rows: &[(usize, usize)]) -> StepOf<M> {
    let mut step = Step::ragged(BLOCK_SIZE, rows);
    M::add_state_rows(&mut step, 0);
    step
}

/// As [`ragged`], of `batch` equal rows that each add `tokens` tokens to `context - tokens` cached ones.
pub fn uniform<M: Model>(batch: usize, tokens: usize, context: usize) -> StepOf<M> {
    ragged::<M>(&vec![(tokens, context); batch])
}

/// `step` with rows added that attend to nothing, until there are `rows`: the shape of a CUDA graph.
pub fn padded<M: Model>(step: &StepOf<M>, rows: usize) -> StepOf<M> {
    let mut padded = step.padded(rows);
    M::add_state_rows(&mut padded, step.rows.len());
    padded
}
