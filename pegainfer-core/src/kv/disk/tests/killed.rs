//! A process that is killed while it writes.

use super::*;
use pegainfer_testing::{Rng, seed};
use std::collections::HashMap;
use std::env;
use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};

const SLOTS: u32 = 24;
const SLOT_BYTES: usize = 256 << 10;
const KILLS: usize = 24;
/// Variable with the index of the configuration that the child uses, and the directory of the file.
const CHILD: &str = "PEGAINFER_TEST_DISK_CHILD";

/// The child: writes blocks to random slots until it is killed, and says what it begins and what is done.
#[test]
#[ignore = "a child process of another test"]
fn writes_until_it_is_killed() {
    let Ok(child) = env::var(CHILD) else { return };
    let mut fields = child.splitn(4, ' ');
    let mut field = || fields.next().unwrap();
    let (backend, direct) = (field() == "ring", field() == "true");
    let (mut number, path) = (field().parse::<u64>().unwrap(), PathBuf::from(field()));
    let mut rng = Rng(number);
    let backend = if backend { DiskBackend::Ring } else { DiskBackend::Threads };
    let (store, _) = open(&DiskConfig { path, backend, direct, ..killed_config(&TempDir::new("child")) });
    let (mut done, mut under_way) = (Vec::new(), 0);
    // The test harness has begun a line.
    say("");
    loop {
        let slot = rng.below(SLOTS as usize) as u32;
        say(&format!("begin {slot} {number}"));
        match write(&store, slot, number) {
            Ok(()) => under_way += 1,
            Err(_) => say(&format!("refused {slot} {number}")),
        }
        number += 1;
        while under_way > 15 {
            store.wait(&mut done, Duration::from_secs(60));
            under_way -= done.len();
            for done in done.drain(..) {
                done.result.unwrap();
                say(&format!("done {} {}", done.slot, done.ticket));
            }
        }
    }
}

/// Writes a line at once, so that it is not lost when the process dies.
fn say(line: &str) {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{line}").unwrap();
    out.flush().unwrap();
}

fn killed_config(dir: &TempDir) -> DiskConfig {
    configs(dir, SLOTS, SLOT_BYTES).swap_remove(0)
}

/// What a slot may hold when the child is dead.
#[derive(Debug, Default, Clone)]
struct Slot {
    /// The block of the last finished write.
    saved: Option<u64>,
    /// Blocks of later writes, which may or may not be finished.
    begun: Vec<u64>,
}

/// Runs the child for a while, kills it, and updates `slots`. Returns the number of its last write.
fn run_and_kill(config: &DiskConfig, first: u64, wait: Duration, slots: &mut HashMap<u32, Slot>) -> u64 {
    let backend = if config.backend == DiskBackend::Ring { "ring" } else { "threads" };
    let child = format!("{backend} {} {first} {}", config.direct, config.path.display());
    let mut child = Command::new(env::current_exe().unwrap())
        .args(["--exact", "kv::disk::tests::killed::writes_until_it_is_killed", "--ignored", "--nocapture"])
        .env(CHILD, child)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map_while(Result::ok);
    let begun = lines.by_ref().find(|line| line.starts_with("begin ")).expect("the child writes");
    // The pipe is read meanwhile: a full one would stop the child.
    let reader = std::thread::spawn(move || lines.collect::<Vec<_>>());
    std::thread::sleep(wait);
    child.kill().unwrap();
    child.wait().unwrap();
    let lines = reader.join().unwrap();
    let mut last = first;
    for line in std::iter::once(&begun).chain(&lines) {
        let fields: Vec<_> = line.split(' ').collect();
        // The last line may be cut, but no other.
        let [what, slot, number] = fields[..] else { continue };
        let (Ok(slot), Ok(number)) = (slot.parse(), number.parse()) else { continue };
        let slot: &mut Slot = slots.entry(slot).or_default();
        match what {
            "begin" => slot.begun.push(number),
            "refused" => slot.begun.retain(|begun| *begun != number),
            "done" => (slot.saved, slot.begun) = (Some(number), slot.begun.split_off(1)),
            _ => {}
        }
        last = last.max(number);
    }
    last
}

#[test]
fn a_killed_process_leaves_whole_blocks_only() {
    let (dir, mut rng) = (TempDir::new("disk"), Rng(seed()));
    let configs = configs(&dir, SLOTS, SLOT_BYTES);
    let mut states = vec![HashMap::new(); configs.len()];
    let (mut next, mut torn, mut finished) = (1, 0, 0);
    for kill in 0..KILLS {
        let (config, slots) = (&configs[kill % configs.len()], &mut states[kill % configs.len()]);
        next = 1 + run_and_kill(config, next, Duration::from_micros(rng.below(20_000) as u64), slots);
        let (store, opened) = open(config);
        assert_eq!((opened.damaged, opened.missing, opened.duplicates, opened.reset), (0, 0, 0, None));
        let mut found: HashMap<_, _> = verified(&store, &opened).into_iter().collect();
        for (slot, state) in slots.iter_mut() {
            let held = found.remove(slot);
            let is_possible = match held {
                Some(number) => state.saved == held || state.begun.contains(&number),
                None => state.saved.is_none() || !state.begun.is_empty(),
            };
            assert!(is_possible, "{config:?}: slot {slot} holds {held:?} after {state:?}");
            torn += usize::from(held.is_none() && !state.begun.is_empty());
            finished += usize::from(held.is_some());
            *state = Slot { saved: held, begun: Vec::new() };
        }
        assert!(found.is_empty(), "blocks that nobody wrote: {found:?}");
    }
    println!("{torn} torn, {finished} finished");
    assert!(torn > 0 && finished > 0, "{torn} slots were empty because of a kill, {finished} were not");
}
