//! Measurements, run by hand: `PEGAINFER_TEST_DISK=/mnt/ssd cargo test --release -p pegainfer-core -- --ignored
//! --nocapture kv::disk::tests::speed`.

use super::*;

/// Bytes of a block of Qwen3-4B: 36 layers of 16 tokens.
const BLOCK: usize = 2_359_296;
const BLOCKS: u32 = 512;

/// Executes one job per slot, with at most `most` under way, and returns bytes per second in GB/s.
fn gigabytes_per_second(store: &Store, most: usize, memory: &mut Vec<AlignedMemory>, is_read: bool) -> f64 {
    let (begun, mut done, mut next, mut finished) = (Instant::now(), Vec::new(), 0, 0);
    let header = SlotHeader { name: name(1), parent: None, tokens: vec![1; TOKENS], checksum: 0 };
    while finished < store.slots() {
        while next < store.slots() && ((next - finished) as usize) < most {
            let Some(memory) = memory.pop() else { break };
            let header = SlotHeader { name: name(next.into()), ..header.clone() };
            let result = if is_read { store.read(0, next, memory) } else { store.write(0, next, &header, memory) };
            result.unwrap();
            next += 1;
        }
        store.wait(&mut done, Duration::from_secs(60));
        finished += done.len() as u32;
        memory.extend(done.drain(..).map(|done| {
            done.result.unwrap();
            done.memory.unwrap()
        }));
    }
    f64::from(store.slots()) * store.slot_bytes() as f64 / begun.elapsed().as_secs_f64() / 1e9
}

/// A new file for the measurement.
fn new_file(slots: u32, slot_bytes: usize) -> (TempDir, Vec<DiskConfig>) {
    let dir = TempDir::new("disk");
    let parent = std::env::var_os("PEGAINFER_TEST_DISK").map_or_else(|| dir.path().to_owned(), PathBuf::from);
    let mut configs = configs(&dir, slots, slot_bytes);
    configs.iter_mut().for_each(|config| config.path = parent.join("pegainfer-speed"));
    (dir, configs)
}

#[test]
#[ignore = "a measurement"]
fn speed_of_blocks() {
    let (_dir, configs) = new_file(BLOCKS, BLOCK);
    for config in &configs {
        let (store, opened) = open(config);
        println!("{:?}, direct {}: {opened}, {:?}", config.backend, config.direct, opened.took);
        let mut memory: Vec<_> = (0..32).map(|i| payload(i, BLOCK)).collect();
        for most in [1, 32] {
            let first = gigabytes_per_second(&store, most, &mut memory, false);
            let write = gigabytes_per_second(&store, most, &mut memory, false);
            let read = gigabytes_per_second(&store, most, &mut memory, true);
            println!("  {most:2} at a time: first write {first:.2} GB/s, write {write:.2} GB/s, read {read:.2} GB/s");
        }
        drop(store);
        std::fs::remove_file(&config.path).unwrap();
    }
}

#[test]
#[ignore = "a measurement"]
fn time_to_open() {
    let (_dir, configs) = new_file(100_000, 4096);
    let config = &configs[configs.len().min(2) - 1];
    let (store, opened) = open(config);
    println!("new file of {} slots: {:?}", opened.slots, opened.took);
    let mut memory: Vec<_> = (0..64).map(|i| payload(i, 4096)).collect();
    let begun = Instant::now();
    gigabytes_per_second(&store, 64, &mut memory, false);
    println!("filled in {:?}", begun.elapsed());
    let begun = Instant::now();
    gigabytes_per_second(&store, 64, &mut memory, true);
    println!("{} reads of 4 KiB, as many as if headers lay next to payloads: {:?}", opened.slots, begun.elapsed());
    drop(store);
    for _ in 0..3 {
        let (_, opened) = open(config);
        println!("{opened}: {:?}", opened.took);
    }
    #[cfg(target_os = "linux")]
    {
        let file = std::fs::File::open(&config.path).unwrap();
        file.sync_all().unwrap();
        rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
        println!("without page cache: {:?}", open(config).1.took);
    }
    std::fs::remove_file(&config.path).unwrap();
}
