//! Opens the places beyond the device that keep KV blocks.

use super::executor::Executor;
use super::load_error::LoadError;
use super::load_options::LoadOptions;
use super::model::Model;
use pegainfer_core::exec::Device;
use pegainfer_core::kv::Naming;
use pegainfer_core::kv::disk::{DiskConfig, DiskStore};
use pegainfer_core::kv::tiers::Tiers;
use pegainfer_core::schedule::EngineCore;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

/// Bytes of each sample of a weight file, and their number.
const SAMPLE: usize = 16 << 10;
const SAMPLES: u64 = 16;

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
    let Some((path, bytes)) = &options.kv_disk else {
        let mut tiers = Tiers::new(pool, Naming::random(), slots, slot_bytes);
        if state_bytes > 0 {
            tiers.use_states(states, state_bytes);
        }
        engine.use_tiers(tiers);
        return Ok(());
    };
    if state_bytes > 0 {
        let why = format!("--kv-disk: {} keeps state outside of KV blocks, which no file has yet", M::NAME);
        return Err(LoadError::Option(why));
    }
    let (ranks, device) = (executor.held_ranks(), executor.exec().device());
    let fingerprint = fingerprint::<M>(config, options, ranks, device)
        .map_err(|e| LoadError::Option(format!("--kv-disk: the weights cannot be read to recognise them: {e}")))?;
    let config = DiskConfig::new(path, *bytes, slot_bytes, M::BLOCK_TOKENS, fingerprint);
    let (store, opened) = DiskStore::open(&config).map_err(|e| LoadError::Option(format!("--kv-disk: {e}")))?;
    log::info!("KV file {}: {opened}", path.display());
    let mut tiers = Tiers::new(pool, Naming::new(&store.secret(), ""), slots, slot_bytes);
    let found = opened.found.into_iter().map(|found| (found.slot, found.header));
    tiers.use_disk(store.slots() as usize, found);
    executor.use_disk(store);
    engine.use_tiers(tiers);
    Ok(())
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
