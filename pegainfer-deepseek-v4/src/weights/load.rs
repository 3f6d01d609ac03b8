//! Loads the weights of all ranks at the same time, with a thread for each.

use super::reader::{Input, Reader};
use super::{Weights, read};
use crate::config::Config;
use pegainfer_core::exec::Exec;
use pegainfer_core::parallel::{Shard, aborted};
use pegainfer_core::weights::feed::{Cursor, Feed, FeedLimits, StopOnPanic, TensorSpec};
use pegainfer_core::weights::{Checkpoint, Source, WeightsError};
use std::panic::resume_unwind;
use std::sync::{Mutex, PoisonError};
use std::thread::{ScopedJoinHandle, scope};

/// Number of threads that read a checkpoint: one copies about 5 GB/s from the page cache, and a disk needs several
/// reads at once.
const READERS: usize = 8;

/// Told about the bytes of each tensor that a rank has loaded.
pub type LoadProgress<'a> = &'a mut (dyn FnMut(u64) + Send);

impl Weights {
    /// Loads the shards of all ranks, each onto its device. Each byte of a checkpoint is read once for any number of
    /// ranks; draft layers are not read unless `config` asks for them. `progress` is called with the size in bytes of
    /// each tensor that a rank has loaded. The first rank that fails ends the load of all.
    pub fn load(
        ranks: &mut [(Exec, Shard)],
        config: &Config,
        source: &Source,
        progress: LoadProgress<'_>,
    ) -> Result<Vec<Self>, WeightsError> {
        match source {
            Source::Checkpoint(checkpoint) => {
                let feed = feed(checkpoint, config, ranks.len(), FeedLimits::DEFAULT)?;
                load_from(&feed, ranks, config, progress)
            }
            Source::Dummy { seed, .. } => {
                on_threads(ranks, config, &|| Input::Dummy(*seed), progress).into_iter().collect()
            }
        }
    }

    /// The tensors of a shard on `Meta`, without reading or computing values.
    pub fn shapes(exec: &mut Exec, config: &Config, shard: Shard) -> Result<Self, WeightsError> {
        read(
            &mut Reader { exec, input: Input::List(&mut Vec::new()), quantized: config.quantized, progress: &|_| () },
            config,
            shard,
        )
    }
}

/// The feed of a checkpoint, in the order in which a rank with the whole model would read it.
fn feed<'a>(
    checkpoint: &'a Checkpoint,
    config: &Config,
    ranks: usize,
    limits: FeedLimits,
) -> Result<Feed<'a>, WeightsError> {
    let mut tensors: Vec<TensorSpec> = Vec::new();
    let mut exec = Exec::meta().map_err(|error| WeightsError::OutOfMemory { name: String::new(), bytes: 0, error })?;
    let input = Input::List(&mut tensors);
    let mut reader = Reader { exec: &mut exec, input, quantized: config.quantized, progress: &|_| () };
    read(&mut reader, config, Shard::WHOLE)?;
    Feed::new(checkpoint, tensors, ranks, limits)
}

/// Loads all ranks from a feed that was made for them.
fn load_from<'a>(
    feed: &'a Feed<'a>,
    ranks: &mut [(Exec, Shard)],
    config: &Config,
    progress: LoadProgress<'_>,
) -> Result<Vec<Weights>, WeightsError> {
    let weights = scope(|scope| {
        // Before any thread waits for one that could not be started.
        let _guard = StopOnPanic(feed);
        (0..READERS).for_each(|_| drop(scope.spawn(|| feed.read())));
        on_threads(ranks, config, &|| Input::Feed(Cursor::new(feed)), progress)
    });
    log::debug!("{} bytes of the checkpoint read", feed.bytes_read());
    match feed.take_failure() {
        Some(error) => Err(error),
        None => weights.into_iter().collect(),
    }
}

/// Loads each rank on its own thread.
fn on_threads<'a>(
    ranks: &mut [(Exec, Shard)],
    config: &Config,
    input: &(dyn Fn() -> Input<'a> + Sync),
    progress: LoadProgress<'_>,
) -> Vec<Result<Weights, WeightsError>> {
    let progress = Mutex::new(progress);
    let progress = |bytes: u64| {
        // A poisoned lock only means that the callback panicked on another thread.
        let mut progress = progress.lock().unwrap_or_else(PoisonError::into_inner);
        progress(bytes);
    };
    let load = |(exec, shard): &mut (Exec, Shard)| {
        let input = input();
        let feed = input.feed();
        let _guard = feed.map(StopOnPanic);
        let mut reader = Reader { exec, input, quantized: config.quantized, progress: &progress };
        match (read(&mut reader, config, *shard), feed) {
            (Err(error), Some(feed)) => {
                feed.fail(error);
                Err(WeightsError::Device(aborted()))
            }
            (loaded, _) => loaded,
        }
    };
    let load = &load;
    let join = |thread: ScopedJoinHandle<'_, _>| thread.join().unwrap_or_else(|panic| resume_unwind(panic));
    scope(|scope| {
        let threads: Vec<_> = ranks.iter_mut().map(|rank| scope.spawn(move || load(rank))).collect();
        threads.into_iter().map(join).collect()
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::inventory::inventory;
    use crate::testing::tiny_dir;
    use pegainfer_core::isa::Isa;
    use std::fs;
    use std::ops::Range;
    use std::path::{Path, PathBuf};
    use std::sync::mpsc::channel;
    use std::time::Duration;

    fn ranks(count: usize) -> Vec<(Exec, Shard)> {
        let exec = || Exec::cpu(Isa::Portable, Some(1)).unwrap();
        Shard::all(count).map(|shard| (exec(), shard)).collect()
    }

    /// Runs `f` on a separate thread; the test fails if it does not end.
    fn ends<R: Send + 'static>(f: impl FnOnce() -> R + Send + 'static) -> R {
        let (sender, result) = channel();
        std::thread::spawn(move || sender.send(f()).unwrap());
        result.recv_timeout(Duration::from_secs(60)).expect("the load ends")
    }

    /// A copy of the bundled checkpoint with weights modified by `change`, which gets all bytes and the ranges of each
    /// tensor.
    fn changed(name: &str, change: impl FnOnce(&mut Vec<u8>, &dyn Fn(&str) -> Range<usize>)) -> PathBuf {
        let dir = std::env::temp_dir().join(format!("pegainfer-{name}-{}", std::process::id()));
        fs::create_dir_all(&dir).unwrap();
        fs::copy(tiny_dir().join("config.json"), dir.join("config.json")).unwrap();
        let mut bytes = fs::read(tiny_dir().join("model.safetensors")).unwrap();
        let header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        let json: serde_json::Value = serde_json::from_slice(&bytes[8..8 + header]).unwrap();
        let place = |name: &str| {
            let offset = |i: usize| 8 + header + json[name]["data_offsets"][i].as_u64().unwrap() as usize;
            offset(0)..offset(1)
        };
        change(&mut bytes, &place);
        fs::write(dir.join("model.safetensors"), bytes).unwrap();
        dir
    }

    fn load_error(dir: &Path, count: usize) -> String {
        let dir = dir.to_owned();
        ends(move || {
            let config = Config::load(&dir).unwrap();
            let source = Source::open(&dir).unwrap();
            let mut ranks = ranks(count);
            let loaded = Weights::load(&mut ranks, &config, &source, &mut |_| {});
            loaded.unwrap_err().to_string()
        })
    }

    #[test]
    fn each_byte_is_read_once_for_any_number_of_ranks() {
        let config = Config::load(&tiny_dir()).unwrap();
        let entries = inventory(&config);
        let stored: u64 = entries.iter().filter(|entry| !entry.draft).map(|entry| entry.bytes()).sum();
        for count in [1, 2, 4] {
            let limits = FeedLimits { chunk_bytes: 10_000, chunks: 3 };
            let (read, told, loaded) = ends(move || {
                let config = Config::load(&tiny_dir()).unwrap();
                let checkpoint = Checkpoint::open(&tiny_dir()).unwrap();
                let feed = feed(&checkpoint, &config, count, limits).unwrap();
                let (mut told, mut ranks) = (0, ranks(count));
                let loaded = load_from(&feed, &mut ranks, &config, &mut |bytes| told += bytes).unwrap().len();
                (feed.bytes_read(), told, loaded)
            });
            let shards: Vec<_> = Shard::all(count).collect();
            let held = |shard: &Shard| entries.iter().map(|entry| entry.loaded_bytes(&config, *shard)).sum::<u64>();
            assert_eq!((read, loaded), (stored, count), "{count} ranks");
            assert_eq!(told, shards.iter().map(held).sum::<u64>(), "{count} ranks");
        }
    }

    #[test]
    fn a_tensor_that_cannot_be_used_ends_the_load_of_all_ranks_with_its_name() {
        let scale = "layers.2.ffn.experts.5.w2.scale";
        let dir = changed("scale", |bytes, place| bytes[place(scale).start + 7] = 255);
        let experts = "layers.0.ffn.gate.tid2eid";
        let other = changed("ids", |bytes, place| bytes[place(experts).start] = 200);
        for count in [1, 2, 4] {
            let error = load_error(&dir, count);
            assert!(error.starts_with(&format!("{scale} is F8_E8M0 with a scale that is not")), "{error}");
            let error = load_error(&other, count);
            assert!(error.starts_with(&format!("{experts} is I64 with expert 200")), "{error}");
        }
        fs::remove_dir_all(&dir).unwrap();
        fs::remove_dir_all(&other).unwrap();
    }

    /// The file is cut while it is open, as by a restarted download.
    #[test]
    fn a_file_that_ends_early_is_named_with_its_tensor() {
        let name = "layers.3.attn.wo_b.weight";
        let mut cut = 0;
        let dir = changed("cut", |_, place| cut = place(name).start as u64 + 100);
        let (error, known) = ends({
            let dir = dir.clone();
            move || {
                let config = Config::load(&dir).unwrap();
                let source = Source::open(&dir).unwrap();
                let file = fs::OpenOptions::new().write(true).open(dir.join("model.safetensors")).unwrap();
                file.set_len(cut).unwrap();
                let mut ranks = ranks(4);
                let loaded = Weights::load(&mut ranks, &config, &source, &mut |_| {});
                let error = loaded.unwrap_err().to_string();
                let named = error.split("model.safetensors: ").nth(1).unwrap().split(':').next().unwrap();
                let known = source.contains(named);
                (error, known)
            }
        });
        assert!(known, "{error}");
        fs::remove_dir_all(&dir).unwrap();
    }
}
