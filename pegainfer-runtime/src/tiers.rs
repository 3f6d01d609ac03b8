//! Opens the places beyond the device that keep KV blocks.

use super::executor::Executor;
use super::load_error::LoadError;
use super::load_options::LoadOptions;
use super::model::Model;
use pegainfer_core::exec::Device;
use pegainfer_core::kv::Naming;
use pegainfer_core::kv::disk::{AlignedMemory, DiskConfig, DiskError, DiskStore, Opened, SlotHeader, SlotKind};
use pegainfer_core::kv::tiers::Tiers;
use pegainfer_core::schedule::EngineCore;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

/// Bytes of each sample of a weight file, and their number.
const SAMPLE: usize = 16 << 10;
const SAMPLES: u64 = 16;

/// End of the name of the file for states, after that of the other one.
const STATES: &str = ".states";
/// Bytes that are lent for reads of states, and for writes. A state can be much larger than a block.
const STATE_JOBS_BYTES: usize = 128 << 20;
/// States that can be read at a time, even if they are larger than that.
const MIN_STATE_JOBS: usize = 2;

/// Refuses options that no model can have, before anything is loaded.
pub(super) fn check<O>(options: &LoadOptions<O>) -> Result<(), LoadError> {
    if options.kv_disk.is_some() && options.kv_offloading_bytes.is_none() {
        let why = "--kv-disk needs --kv-offloading-size: blocks pass through host memory";
        return Err(LoadError::Option(why.to_owned()));
    }
    Ok(())
}

/// Keeps copies of KV blocks in host memory, and in a file, if the options ask for it.
pub(super) fn open<M: Model>(
    engine: &mut EngineCore<Executor<M>>,
    config: &M::Config,
    options: &LoadOptions<M::Options>,
) -> Result<(), LoadError> {
    let Some(bytes) = options.kv_offloading_bytes else { return Ok(()) };
    let pool = engine.scheduler().pool().clone();
    let executor = engine.executor();
    let sizes = executor.kept_sizes()?;
    let ([slot_bytes, state_bytes], [slots, states]) = (sizes, executor.open_host_slots(bytes, sizes)?);
    let files = match &options.kv_disk {
        None => None,
        Some(file) => {
            let (ranks, device) = (executor.held_ranks(), executor.exec().device());
            let fingerprint = fingerprint::<M>(config, options, ranks, device).map_err(|e| {
                LoadError::Option(format!("--kv-disk: the weights cannot be read to recognise them: {e}"))
            })?;
            Some(KvFiles::open(file, sizes, M::BLOCK_TOKENS, fingerprint)?)
        }
    };
    let naming = files.as_ref().map_or_else(Naming::random, |files| Naming::new(&files.blocks.0.secret(), ""));
    let mut tiers = Tiers::new(pool, naming, slots, slot_bytes);
    if state_bytes > 0 {
        tiers.use_states(states, state_bytes);
    }
    if let Some(KvFiles { blocks: (blocks, opened), states }) = files {
        tiers.use_disk(blocks.slots() as usize, found(opened));
        let states = states.map(|(states, opened)| {
            tiers.use_state_disk(states.slots() as usize, found(opened));
            states
        });
        executor.use_disk(blocks, states);
    }
    engine.use_tiers(tiers);
    Ok(())
}

/// A file, and what opening it found.
type KvFile = (DiskStore<AlignedMemory>, Opened);

/// The files of a model.
struct KvFiles {
    blocks: KvFile,
    /// Of a model with state outside of KV blocks.
    states: Option<KvFile>,
}

impl KvFiles {
    /// Opens or creates the file at this path, of this size, and for a model with states the one next to it. Each of
    /// both has half of the size then: no other split can hold more than twice as much of any prompts, whatever number
    /// of their states is of use.
    fn open(
        (path, bytes): &(PathBuf, u64),
        [slot_bytes, state_bytes]: [usize; 2],
        slot_tokens: usize,
        fingerprint: [u8; 32],
    ) -> Result<Self, LoadError> {
        let share = if state_bytes > 0 { bytes / 2 } else { *bytes };
        let open = |config: &DiskConfig| -> Result<KvFile, LoadError> {
            let opened = DiskStore::open(config).map_err(|error| refusal(&error, config.kind, state_bytes > 0))?;
            log::info!("KV file {}: {}", config.path.display(), opened.1);
            Ok(opened)
        };
        let blocks: KvFile = open(&DiskConfig::new(path, share, slot_bytes, slot_tokens, fingerprint))?;
        if state_bytes == 0 {
            return Ok(Self { blocks, states: None });
        }
        let mut path = path.clone();
        path.as_mut_os_string().push(STATES);
        // Names of states are those of the other file's blocks, so that they mean nothing without that file.
        let mut hasher = blake3::Hasher::new();
        hasher.update(b"states").update(&fingerprint).update(&blocks.0.secret());
        let config = DiskConfig::new(&path, share, state_bytes, slot_tokens, *hasher.finalize().as_bytes());
        let queue = (STATE_JOBS_BYTES / state_bytes).clamp(MIN_STATE_JOBS, config.queue);
        let states = open(&DiskConfig { kind: SlotKind::State, queue, ..config })?;
        Ok(Self { blocks, states: Some(states) })
    }
}

/// The error for a file that cannot be opened.
fn refusal(error: &DiskError, kind: SlotKind, has_states: bool) -> LoadError {
    LoadError::Option(match error {
        DiskError::TooSmall { needed, .. } if has_states => format!(
            "--kv-disk: half of the size is for blocks and half for states, and one {} takes {needed} bytes: \
             give at least {} bytes",
            kind.name(),
            2 * needed
        ),
        error => format!("--kv-disk: {error}"),
    })
}

/// Blocks or states and their slots.
fn found(opened: Opened) -> impl Iterator<Item = (u32, SlotHeader)> {
    opened.found.into_iter().map(|found| (found.slot, found.header))
}

/// Hash of all that decides the bytes of a block: the model's numbers, samples of its weights, the layout, and the
/// version of this program.
fn fingerprint<M: Model>(
    config: &M::Config,
    options: &LoadOptions<M::Options>,
    ranks: usize,
    device: Device,
) -> io::Result<[u8; 32]> {
    let mut hasher = blake3::Hasher::new();
    let (name, seed, version) = (M::NAME, options.dummy_seed, env!("CARGO_PKG_VERSION"));
    let overrides = &options.overrides;
    hasher.update(format!("{name} {config:?} {overrides:?} {seed:?} {ranks} {device:?} {version}").as_bytes());
    for path in weight_files(&options.model_path)? {
        let mut file = File::open(&path)?;
        let size = file.metadata()?.len();
        hasher.update(&size.to_le_bytes());
        for sample in 0..SAMPLES {
            file.seek(SeekFrom::Start(size / SAMPLES * sample))?;
            let mut bytes = Vec::with_capacity(SAMPLE);
            (&mut file).take(SAMPLE as u64).read_to_end(&mut bytes)?;
            hasher.update(&bytes);
        }
    }
    Ok(*hasher.finalize().as_bytes())
}

/// The weight files of a checkpoint, in the order of their names.
fn weight_files(path: &Path) -> io::Result<Vec<PathBuf>> {
    if path.is_file() {
        return Ok(vec![path.to_owned()]);
    }
    let is_weights = |path: &PathBuf| path.extension().is_some_and(|end| end == "safetensors" || end == "gguf");
    let files =
        std::fs::read_dir(path)?.map(|entry| entry.map(|entry| entry.path())).collect::<io::Result<Vec<_>>>()?;
    let mut files: Vec<PathBuf> = files.into_iter().filter(is_weights).collect();
    files.sort();
    Ok(files)
}
