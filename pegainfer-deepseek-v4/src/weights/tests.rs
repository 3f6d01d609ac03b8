//! Loads the bundled checkpoint onto ranks on the CPU.

use crate::config::Config;
use crate::inventory::inventory;
use crate::rank_config::{DeepSeekV4, Options, RankConfig};
use crate::testing::tiny_dir;
use pegainfer_core::exec::Exec;
use pegainfer_core::isa::Isa;
use pegainfer_core::parallel::Shard;
use pegainfer_core::weights::Source;
use pegainfer_runtime::load_rank_weights;
use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::mpsc::channel;
use std::time::Duration;

fn ranks(count: usize) -> Vec<(Exec, Shard)> {
    let exec = || Exec::cpu(Isa::Portable, Some(1)).unwrap();
    Shard::all(count).map(|shard| (exec(), shard)).collect()
}

fn config(dir: &Path) -> RankConfig {
    RankConfig::new(Config::load(dir).unwrap(), Options::default())
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

/// The error of a load onto `count` ranks. The file is cut to `length` bytes after it was opened, if there is one.
fn load_error(dir: &Path, count: usize, length: Option<u64>) -> String {
    let dir = dir.to_owned();
    ends(move || {
        let (config, source) = (config(&dir), Source::open(&dir).unwrap());
        if let Some(length) = length {
            let file = fs::OpenOptions::new().write(true).open(dir.join("model.safetensors")).unwrap();
            file.set_len(length).unwrap();
        }
        load_rank_weights::<DeepSeekV4>(&mut ranks(count), &config, &source, &mut |_| {}).unwrap_err().to_string()
    })
}

#[test]
fn each_byte_is_read_once_for_any_number_of_ranks() {
    let numbers = Config::load(&tiny_dir()).unwrap();
    let entries = inventory(&numbers);
    let stored: u64 = entries.iter().filter(|entry| !entry.draft).map(|entry| entry.bytes()).sum();
    for count in [1, 2, 4] {
        let (read, told, loaded) = ends(move || {
            let (config, source) = (config(&tiny_dir()), Source::open(&tiny_dir()).unwrap());
            let mut told = 0;
            let mut progress = |bytes| told += bytes;
            let loaded = load_rank_weights::<DeepSeekV4>(&mut ranks(count), &config, &source, &mut progress).unwrap();
            let Source::Checkpoint(checkpoint) = &source else { panic!("it is a checkpoint") };
            (checkpoint.bytes_read(), told, loaded.len())
        });
        let held = |shard: Shard| entries.iter().map(|entry| entry.loaded_bytes(&numbers, shard)).sum::<u64>();
        assert_eq!((read, loaded), (stored, count), "{count} ranks");
        assert_eq!(told, Shard::all(count).map(held).sum::<u64>(), "{count} ranks");
    }
}

#[test]
fn a_tensor_that_cannot_be_used_ends_the_load_of_all_ranks_with_its_name() {
    let scale = "layers.2.ffn.experts.5.w2.scale";
    let dir = changed("scale", |bytes, place| bytes[place(scale).start + 7] = 255);
    let experts = "layers.0.ffn.gate.tid2eid";
    let other = changed("ids", |bytes, place| bytes[place(experts).start] = 200);
    for count in [1, 2, 4] {
        let error = load_error(&dir, count, None);
        assert!(error.starts_with(&format!("{scale} is F8_E8M0 with a scale that is not")), "{error}");
        let error = load_error(&other, count, None);
        assert!(error.starts_with(&format!("{experts} is I64 with number 200")), "{error}");
    }
    fs::remove_dir_all(&dir).unwrap();
    fs::remove_dir_all(&other).unwrap();
}

/// The file is cut while it is open, as by a restarted download.
#[test]
fn a_file_that_ends_early_is_named_with_its_tensor() {
    for count in [1, 4] {
        let mut cut = 0;
        let dir = changed("cut", |_, place| cut = place("layers.3.attn.wo_b.weight").start as u64 + 100);
        let source = Source::open(&dir).unwrap();
        let error = load_error(&dir, count, Some(cut));
        let named = error.split("model.safetensors: ").nth(1).unwrap().split(':').next().unwrap();
        assert!(source.contains(named), "{error}");
        fs::remove_dir_all(&dir).unwrap();
    }
}
