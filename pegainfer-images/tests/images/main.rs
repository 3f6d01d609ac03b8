//! Images of requests against what transformers, torchvision and Pillow make of them.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod counting;
mod decoding;
mod orientation;
mod refused;
mod sizes;

use ring::digest::{SHA256, digest};
use serde_json::Value;
use std::path::PathBuf;

fn fixtures() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures")
}

/// The bytes of a fixture.
fn fixture(name: &str) -> Vec<u8> {
    let path = fixtures().join(name);
    std::fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// A part of expect.json.
fn expected(part: &str) -> Value {
    serde_json::from_slice::<Value>(&fixture("expect.json")).unwrap()[part].take()
}

/// Names of the files in a folder of fixtures, sorted.
fn names(folder: &str) -> Vec<String> {
    let entries = std::fs::read_dir(fixtures().join(folder)).unwrap();
    let mut names: Vec<String> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

fn keys(value: &Value) -> Vec<String> {
    let mut keys: Vec<String> = value.as_object().unwrap().keys().cloned().collect();
    keys.sort();
    keys
}

fn pair(value: &Value) -> (u32, u32) {
    let side = |i: usize| value[i].as_u64().unwrap() as u32;
    (side(0), side(1))
}

fn sha256(bytes: &[u8]) -> String {
    digest(&SHA256, bytes).as_ref().iter().map(|byte| format!("{byte:02x}")).collect()
}
