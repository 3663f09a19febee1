//! Backups of a made-up volume: what is given back is what it was, whatever was deleted, damaged or broken off between.

use holdfast_backup::lock::{Kind, Lock};
use holdfast_backup::{
    Backup, CHUNK_BYTES, Directory, Error, Manifest, PAGE_CHUNKS, Repository, Source, Store, Writing, prune, to_file,
    to_output, verify,
};
use holdfast_base::{ObjectId, VolumeId};
use holdfast_cipher::{BackupKey, Secret};
use holdfast_format::stream::SnapshotId;
use proptest::prelude::*;
use std::collections::BTreeSet;
use std::fs::{self, File, FileTimes};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};
use tempfile::TempDir;

const CHUNK: usize = CHUNK_BYTES as usize;
const HOUR_MS: u64 = 3_600_000;

struct Place {
    dir: TempDir,
    key: Option<BackupKey>,
}

impl Place {
    fn new(is_encrypted: bool) -> Place {
        let dir = TempDir::new().expect("a directory");
        let key = is_encrypted.then(|| BackupKey::new(&Secret::new([9; 32])));
        fs::create_dir(dir.path().join("repository")).expect("made");
        let place = Place { dir, key };
        Repository::init(&place.root().display().to_string(), place.key.clone()).expect("an empty directory");
        place
    }

    fn root(&self) -> PathBuf {
        self.dir.path().join("repository")
    }

    fn open(&self) -> Repository {
        Repository::open(&self.root().display().to_string(), self.key.clone()).expect("it was made")
    }

    fn restored(&self, backup: &Backup) -> Vec<u8> {
        let path = self.dir.path().join("image");
        to_file(&self.open(), backup, &path, false, |_| {}).expect("restored");
        let bytes = fs::read(&path).expect("written");
        fs::remove_file(&path).expect("there");
        bytes
    }

    /// Files below a folder of the repository.
    fn files(&self, folder: &str) -> Vec<PathBuf> {
        let mut found = Vec::new();
        let mut todo = vec![self.root().join(folder)];
        while let Some(dir) = todo.pop() {
            for entry in fs::read_dir(dir).into_iter().flatten() {
                let path = entry.expect("read").path();
                if path.is_dir() { todo.push(path) } else { found.push(path) }
            }
        }
        found.sort();
        found
    }

    /// As if all were two days old.
    fn age(&self) {
        let old = SystemTime::now() - Duration::from_secs(2 * 86_400);
        for path in self.files("chunks") {
            let file = File::options().write(true).open(path).expect("opened");
            file.set_times(FileTimes::new().set_modified(old)).expect("set");
        }
    }
}

fn source(volume: u128, layer: u32, taken_ms: u64) -> Source {
    Source {
        volume: format!("vm{volume}"),
        snapshot: format!("s{layer}"),
        snapshot_id: SnapshotId { volume: VolumeId(volume), layer: ObjectId(layer) },
        taken_ms,
        layout: "mirror:2".to_string(),
        encrypted: false,
    }
}

/// Gives all of it, or of a base the chunks of `changed`.
fn back_up(
    repository: &Repository,
    bytes: &[u8],
    base: Option<(&Backup, &BTreeSet<u64>)>,
    of: Source,
) -> Result<Backup, Error> {
    let mut writing = Writing::begin(repository, bytes.len() as u64)?;
    let mut wanted: BTreeSet<u64> = (0..Manifest::chunks_of(bytes.len() as u64)).collect();
    if let Some((base, changed)) = base {
        wanted = writing.build_on(base)?.into_iter().chain(changed.iter().copied()).collect();
    }
    writing.write(|give| {
        wanted.iter().filter(|chunk| (**chunk as usize) < bytes.len().div_ceil(CHUNK)).try_for_each(|chunk| {
            let at = *chunk as usize * CHUNK;
            give.chunk(*chunk, &bytes[at..bytes.len().min(at + CHUNK)])
        })
    })?;
    writing.commit(of).map(|(backup, _)| backup)
}

fn filled(chunks: usize, seed: u8) -> Vec<u8> {
    (0..chunks * CHUNK).map(|at| (at / 4096) as u8 ^ (at / CHUNK) as u8 ^ seed).collect()
}

#[test]
fn backups_build_on_each_other_and_store_what_changed_once() {
    for is_encrypted in [false, true] {
        let place = Place::new(is_encrypted);
        let repository = place.open();
        let mut bytes = filled(5, 1);
        bytes[2 * CHUNK..3 * CHUNK].fill(0);
        bytes.truncate(5 * CHUNK - 8192);
        let first = back_up(&repository, &bytes, None, source(1, 1, 1000)).expect("stored");
        assert_eq!(first.manifest.data_bytes, 4 * CHUNK_BYTES - 8192);
        assert_eq!(place.restored(&first), bytes);
        let before = bytes.clone();
        let objects = place.files("chunks").len();
        bytes[CHUNK + 5] ^= 1;
        let second =
            back_up(&repository, &bytes, Some((&first, &BTreeSet::from([1]))), source(1, 2, 2000)).expect("stored");
        assert_eq!(place.files("chunks").len(), objects + 2, "a chunk and a page");
        assert_eq!((place.restored(&first), place.restored(&second)), (before.clone(), bytes.clone()));
        let third = back_up(&repository, &bytes, None, source(7, 1, 3000)).expect("stored");
        assert_eq!(third.manifest.added_bytes, 0, "another volume with the same bytes");
        let mut out = Vec::new();
        to_output(&repository, &second, &mut out, false, |_| {}).expect("restored");
        assert_eq!(out, bytes);
        let catalogue = repository.catalogue().expect("read");
        assert_eq!(catalogue.find("vm1").expect("there"), &second, "the latest");
        assert_eq!(catalogue.find(&first.id).expect("there"), &first);
        assert!(catalogue.find("vm2").unwrap_err().to_string().contains("backup list"));
        assert!(place.files("locks").is_empty());
        let is_aside = |path: &PathBuf| path.file_name().is_some_and(|name| name.as_encoded_bytes()[0] == b'.');
        assert!(!place.files("").iter().any(is_aside));
    }
}

#[test]
fn sizes_that_change_are_followed() {
    let place = Place::new(false);
    let repository = place.open();
    let whole = filled(6, 3);
    let mut base = back_up(&repository, &whole[..5 * CHUNK + 4096], None, source(1, 1, 1)).expect("stored");
    // Chunks that are new or cut are given by nobody but who looks for them.
    for (len, layer) in [(3 * CHUNK + 8192, 2), (3 * CHUNK, 3), (2 * CHUNK - 4096, 4), (6 * CHUNK, 5)] {
        let grown: BTreeSet<u64> =
            (Manifest::chunks_of(base.manifest.size_bytes)..Manifest::chunks_of(len as u64)).collect();
        base = back_up(&repository, &whole[..len], Some((&base, &grown)), source(1, layer, u64::from(layer)))
            .expect("stored");
        assert_eq!(place.restored(&base), &whole[..len], "{len}");
        assert_eq!(base.manifest.data_bytes, len as u64, "no chunk of it is a hole");
    }
}

#[test]
fn what_nobody_needs_goes_and_all_else_stays() {
    let place = Place::new(false);
    let repository = place.open();
    let mut bytes = filled(3, 9);
    let mut kept = Vec::new();
    for hour in 0..6_u64 {
        bytes[..CHUNK].fill(hour as u8 + 100);
        kept.push((
            back_up(&repository, &bytes, None, source(1, hour as u32, hour * HOUR_MS)).expect("stored"),
            bytes.clone(),
        ));
    }
    let other = back_up(&repository, &filled(1, 77), None, source(2, 1, 5)).expect("stored");
    let keep = "2h".parse().expect("a rule");
    let dry = prune(&repository, Some(&keep), true).expect("looked");
    assert_eq!((dry.deleted.len(), dry.kept), (4, 3));
    assert_eq!(repository.catalogue().expect("read").backups.len(), 7, "nothing was done");
    let young = prune(&repository, Some(&keep), false).expect("pruned");
    assert_eq!((young.deleted.len(), young.freed_objects), (4, 0), "chunks of today stay");
    assert!(young.young_bytes > 0);
    // Of a writer that was killed.
    let left = place.files("chunks")[0].with_file_name(".left");
    fs::write(&left, b"half").expect("written");
    prune(&repository, None, false).expect("pruned");
    assert!(left.exists(), "it may be at work");
    place.age();
    let pruned = prune(&repository, None, false).expect("pruned");
    assert!(!left.exists());
    assert_eq!((pruned.freed_objects, pruned.kept), (8, 3), "four chunks and four pages");
    for (backup, bytes) in &kept[4..] {
        assert_eq!(&place.restored(backup), bytes);
    }
    assert_eq!(place.restored(&other), filled(1, 77));
    assert!(verify(&repository, false, false, |_, _| {}).expect("read").damage.is_empty());
    repository.delete(&["nothing".to_string()]).unwrap_err();
    repository.delete(std::slice::from_ref(&other.id)).expect("there");
    assert!(repository.catalogue().expect("read").find("vm2").is_err());
}

#[test]
fn damage_is_found_named_and_mended_by_the_next_backup() {
    let place = Place::new(true);
    let repository = place.open();
    let bytes = filled(4, 5);
    let first = back_up(&repository, &bytes, None, source(1, 1, 1)).expect("stored");
    // The largest objects are chunks; two are hurt, each in its own way.
    let mut chunks = place.files("chunks");
    chunks.sort_by_key(|path| fs::metadata(path).expect("there").len());
    let mut text = fs::read(&chunks[3]).expect("read");
    text[30] ^= 1;
    fs::write(&chunks[3], text).expect("written");
    fs::remove_file(&chunks[4]).expect("there");
    let found = verify(&repository, false, false, |_, _| {}).expect("read");
    assert_eq!(found.damage.len(), 2, "{found:?}");
    assert!(found.damage.iter().all(|damage| damage.backups == [first.id.clone()]));
    let quick = verify(&repository, true, false, |_, _| {}).expect("looked");
    assert_eq!(quick.damage.len(), 1, "only what is missing");
    let path = place.dir.path().join("image");
    let why = to_file(&repository, &first, &path, false, |_| {}).unwrap_err();
    assert!(why.to_string().contains("--skip-damaged") && !path.exists(), "{why}");
    let rest = to_file(&repository, &first, &path, true, |_| {}).expect("the rest");
    let restored = fs::read(&path).expect("written");
    for chunk in 0..4 {
        let range = chunk * CHUNK..(chunk + 1) * CHUNK;
        let is_lost = rest.damaged.iter().any(|lost| lost.contains(&(range.start as u64)));
        assert_eq!(restored[range.clone()] == bytes[range.clone()], !is_lost);
    }
    assert_eq!(rest.damaged.iter().map(|lost| lost.end - lost.start).sum::<u64>(), 2 * CHUNK_BYTES);
    fs::remove_file(&path).expect("there");
    // Nothing changed in the volume, and nothing is given: what was set aside is asked for.
    verify(&repository, false, true, |_, _| {}).expect("set aside");
    let second = back_up(&repository, &bytes, Some((&first, &BTreeSet::new())), source(1, 2, 2)).expect("stored");
    assert_eq!((place.restored(&first), place.restored(&second)), (bytes.clone(), bytes));
    assert!(verify(&repository, false, false, |_, _| {}).expect("read").damage.is_empty());
    assert!(place.files("damaged").is_empty(), "it is damaged no more");
}

#[test]
fn a_manifest_or_a_page_that_is_hurt_is_no_reason_to_delete() {
    let place = Place::new(false);
    let repository = place.open();
    let first = back_up(&repository, &filled(2, 1), None, source(1, 1, 1)).expect("stored");
    let second = back_up(&repository, &filled(2, 2), None, source(1, 2, HOUR_MS)).expect("stored");
    place.age();
    let manifest = place.files("backups").remove(0);
    let right = fs::read(&manifest).expect("read");
    fs::write(&manifest, b"rot").expect("written");
    let keep = "1h".parse().expect("a rule");
    let why = prune(&repository, Some(&keep), false).unwrap_err().to_string();
    assert!(why.contains(&first.id) && why.contains("backup delete"), "{why}");
    assert_eq!(place.files("chunks").len(), 6);
    let found = verify(&repository, false, false, |_, _| {}).expect("read");
    assert_eq!(found.damage.iter().flat_map(|damage| damage.backups.clone()).collect::<Vec<_>>(), [&*first.id]);
    fs::write(&manifest, right).expect("written");
    let page = second.manifest.pages[0].expect("it has data");
    fs::remove_file(place.root().join(page.chunk())).expect("there");
    let why = prune(&repository, Some(&keep), false).unwrap_err().to_string();
    assert!(why.contains(&second.id) && why.contains("--set-aside") && why.contains("backup delete"), "{why}");
    assert_eq!(place.files("backups").len(), 2);
    repository.delete(&[second.id]).expect("given up");
    prune(&repository, Some(&keep), false).expect("pruned");
    assert_eq!(place.restored(&first), filled(2, 1));
}

#[test]
fn a_file_that_cannot_be_read_is_damage_and_no_end() {
    let place = Place::new(false);
    let repository = place.open();
    let bytes = filled(3, 5);
    let first = back_up(&repository, &bytes, None, source(1, 1, 1)).expect("stored");
    // The kernel refuses to read it, as a file on bad sectors.
    let mut chunks = place.files("chunks");
    chunks.sort_by_key(|path| fs::metadata(path).expect("there").len());
    let hurt = chunks.pop().expect("there are some");
    fs::remove_file(&hurt).expect("there");
    std::os::unix::fs::symlink(&hurt, &hurt).expect("made");
    let found = verify(&repository, false, false, |_, _| {}).expect("all else is read");
    assert!(matches!(&found.damage[..], [damage] if damage.backups == [first.id.clone()]), "{found:?}");
    let path = place.dir.path().join("image");
    assert_eq!(to_file(&repository, &first, &path, true, |_| {}).expect("the rest").damaged.len(), 1);
    verify(&repository, false, true, |_, _| {}).expect("set aside");
    back_up(&repository, &bytes, Some((&first, &BTreeSet::new())), source(1, 2, 2)).expect("stored");
    assert!(verify(&repository, false, false, |_, _| {}).expect("read").damage.is_empty());
    assert!(fs::remove_file(&path).is_ok() && place.restored(&first) == bytes && place.files("damaged").is_empty());
}

#[test]
fn nothing_is_built_on_a_page_that_is_hurt() {
    let place = Place::new(false);
    let repository = place.open();
    let size_bytes = (PAGE_CHUNKS + 1) * CHUNK_BYTES;
    let far = |layer: u32, base: Option<&Backup>| {
        let mut writing = Writing::begin(&repository, size_bytes)?;
        base.map_or(Ok(Vec::new()), |base| writing.build_on(base))?;
        writing.write(|give| {
            give.chunk(0, &filled(1, layer as u8))?;
            if base.is_none() { give.chunk(PAGE_CHUNKS, &filled(1, 100)) } else { Ok(()) }
        })?;
        writing.commit(source(1, layer, u64::from(layer))).map(|(backup, _)| backup)
    };
    let first = far(1, None).expect("stored");
    far(2, Some(&first)).expect("only the first page changed");
    let page = place.root().join(first.manifest.pages[1].expect("it has data").chunk());
    File::options().write(true).open(&page).expect("there").set_len(40).expect("cut");
    let mut writing = Writing::begin(&repository, size_bytes).expect("begun");
    assert!(matches!(writing.build_on(&first), Err(Error::Damaged(_))));
    drop(writing);
    // What lies under the other page is there.
    let path = place.dir.path().join("image");
    let rest = to_file(&repository, &first, &path, true, |_| {}).expect("the rest");
    assert_eq!(rest.damaged, std::slice::from_ref(&(PAGE_CHUNKS * CHUNK_BYTES..size_bytes)));
    let mut chunk = vec![0; CHUNK];
    File::open(&path).expect("written").read_exact(&mut chunk).expect("as long");
    assert!(chunk == filled(1, 1));
    // All is given then, and the page has the same name.
    far(3, None).expect("stored");
    assert!(verify(&repository, false, false, |_, _| {}).expect("read").damage.is_empty());
}

#[test]
fn nothing_is_built_on_what_was_deleted_meanwhile() {
    let place = Place::new(false);
    let repository = place.open();
    let first = back_up(&repository, &filled(2, 1), None, source(1, 1, 1)).expect("stored");
    repository.delete(std::slice::from_ref(&first.id)).expect("there");
    let built = back_up(&repository, &filled(2, 1), Some((&first, &BTreeSet::new())), source(1, 2, 2));
    assert!(matches!(built, Err(Error::NotFound(_))));
    let second = back_up(&repository, &filled(2, 1), None, source(1, 2, 2)).expect("stored");
    assert_eq!(place.restored(&second), filled(2, 1));
    // An empty file is no chunk.
    let chunk = place.files("chunks").into_iter().max_by_key(|path| fs::metadata(path).expect("there").len());
    fs::write(chunk.expect("there are some"), b"").expect("written");
    assert_eq!(verify(&repository, true, false, |_, _| {}).expect("looked").damage.len(), 1);
}

#[test]
fn who_deletes_is_alone() {
    let place = Place::new(false);
    let repository = place.open();
    let store: Arc<dyn Store> = Arc::new(Directory::open(&place.root()).expect("there"));
    let lock = Lock::take(&store, Kind::Shared, "writing").expect("nobody is there");
    let also = Lock::take(&store, Kind::Shared, "reading").expect("together");
    let why = prune(&repository, None, false).unwrap_err();
    assert!(matches!(&why, Error::Busy(text) if text.contains("try again")), "{why}");
    drop(also);
    // Its holder was not heard of for an hour: it is nobody's, and the holder sees that.
    let file = File::options().write(true).open(&place.files("locks")[0]).expect("there");
    file.set_times(FileTimes::new().set_modified(SystemTime::now() - Duration::from_secs(3600))).expect("set");
    let alone = Lock::take(&store, Kind::Exclusive, "pruning").expect("nobody is there any more");
    assert!(matches!(lock.check(), Err(Error::Busy(_))));
    alone.check().expect("it is held");
    let refused = back_up(&repository, &filled(1, 1), None, source(1, 1, 1)).unwrap_err();
    assert!(refused.to_string().contains("pruning"), "{refused}");
    drop((alone, lock));
    assert!(place.files("locks").is_empty());
}

#[test]
fn an_image_overwrites_nothing() {
    let place = Place::new(false);
    let repository = place.open();
    let backup = back_up(&repository, &filled(1, 1), None, source(1, 1, 1)).expect("stored");
    let (image, partial) = (place.dir.path().join("image"), place.dir.path().join("image.partial"));
    let other = place.dir.path().join("other");
    fs::write(&other, b"precious").expect("written");
    std::os::unix::fs::symlink(&other, &partial).expect("made");
    let why = to_file(&repository, &backup, &image, false, |_| {}).unwrap_err();
    assert!(matches!(&why, Error::Exists(text) if text.contains("rm ")), "{why}");
    assert!(fs::read(&other).expect("there") == b"precious" && partial.is_symlink() && !image.exists());
    fs::remove_file(&partial).expect("there");
    let mut is_first = true;
    to_file(&repository, &backup, &image, false, |_| {
        if std::mem::take(&mut is_first) {
            to_file(&repository, &backup, &image, false, |_| {}).expect_err("somebody writes it");
        }
    })
    .expect("restored");
    assert!(fs::read(&image).expect("there") == filled(1, 1) && !partial.exists());
}

#[test]
fn what_cannot_be_written_to_is_read() {
    let place = Place::new(false);
    let repository = place.open();
    let backup = back_up(&repository, &filled(2, 1), None, source(1, 1, 1)).expect("stored");
    // Nothing can be made in a folder that is a file.
    fs::remove_dir(place.root().join("locks")).expect("empty");
    fs::write(place.root().join("locks"), b"").expect("written");
    assert_eq!(place.restored(&backup), filled(2, 1));
    assert!(verify(&repository, false, false, |_, _| {}).expect("read").damage.is_empty());
    assert!(matches!(prune(&repository, None, false), Err(Error::Store(_))));
    assert!(matches!(back_up(&repository, &filled(2, 2), None, source(1, 2, 2)), Err(Error::Store(_))));
}

#[test]
fn places_that_are_no_repository_are_refused() {
    let place = Place::new(true);
    let root = place.root().display().to_string();
    let says = |outcome: Result<Repository, Error>| outcome.err().expect("refused").to_string();
    assert!(says(Repository::init(&root, None)).contains("already"));
    assert!(says(Repository::open(&root, None)).contains("--key-file"));
    assert!(says(Repository::open(&root, Some(BackupKey::new(&Secret::new([1; 32]))))).contains("another key"));
    let dir = place.dir.path().display().to_string();
    assert!(says(Repository::init(&dir, None)).contains("mkdir"), "it has other things in it");
    assert!(says(Repository::open(&dir, None)).contains("backup init"));
    assert!(says(Repository::open(&format!("{dir}/none"), None)).contains("mkdir -p"));
    assert!(says(Repository::open("ftp://host", None)).contains("s3:https"));
    let about = Path::new(&root).join("repository.json");
    let later = fs::read_to_string(&about).expect("read").replace("\"format\": 1", "\"format\": 2");
    fs::write(&about, later).expect("written");
    assert!(says(Repository::open(&root, place.key.clone())).contains("later release"));
}

#[test]
fn a_backup_that_cannot_be_stored_is_none() {
    let place = Place::new(false);
    let repository = place.open();
    let first = back_up(&repository, &filled(1, 1), None, source(1, 1, 1)).expect("stored");
    // A file where folders are to be made: nothing more can be stored.
    fs::rename(place.root().join("chunks"), place.root().join("moved")).expect("moved");
    fs::write(place.root().join("chunks"), b"").expect("written");
    let why = back_up(&repository, &filled(40, 2), None, source(1, 2, 2)).unwrap_err();
    assert!(matches!(&why, Error::Store(text) if text.contains("chunks")), "{why}");
    fs::remove_file(place.root().join("chunks")).expect("there");
    fs::rename(place.root().join("moved"), place.root().join("chunks")).expect("moved");
    assert_eq!(repository.catalogue().expect("read").backups, std::slice::from_ref(&first));
    assert_eq!(place.restored(&first), filled(1, 1));
    assert!(place.files("locks").is_empty());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// Any course of writes and backups, each with its own base.
    #[test]
    fn every_backup_is_what_the_volume_was(
        steps in proptest::collection::vec((0_u64..6, any::<u8>(), 0_usize..3, any::<proptest::sample::Index>()), 1..8),
        is_encrypted in any::<bool>(),
    ) {
        let place = Place::new(is_encrypted);
        let repository = place.open();
        let mut bytes = vec![0; 5 * CHUNK + 4096];
        let mut all: Vec<(Backup, Vec<u8>)> = Vec::new();
        for (number, (chunk, value, writes, base)) in steps.into_iter().enumerate() {
            for at in 0..=writes {
                let from = ((chunk as usize + at) % 6) * CHUNK;
                bytes[from..][..4096].fill(value);
            }
            let of = source(1, number as u32, number as u64);
            let backup = match all.is_empty() {
                true => back_up(&repository, &bytes, None, of),
                false => {
                    let (base, then) = &all[base.index(all.len())];
                    let differ = |chunk: &u64| {
                        let range = *chunk as usize * CHUNK..bytes.len().min((*chunk as usize + 1) * CHUNK);
                        bytes[range.clone()] != then[range]
                    };
                    let changed = (0..6).filter(differ).collect();
                    back_up(&repository, &bytes, Some((base, &changed)), of)
                }
            };
            all.push((backup.expect("stored"), bytes.clone()));
        }
        for (backup, then) in &all {
            prop_assert!(&place.restored(backup) == then);
        }
        let found = verify(&repository, false, false, |_, _| ()).unwrap();
        prop_assert!(found.damage.is_empty());
    }
}
