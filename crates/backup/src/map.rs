//! Which chunk lies where in a volume: pages of names, read when they are asked for.

use crate::object::Name;
use crate::parallel::in_order;
use crate::{CHUNK_BYTES, Error, Manifest, Repository, Result};
use std::collections::BTreeMap;
use std::ops::Range;

/// Names in a page.
pub const PAGE_CHUNKS: u64 = 4096;

type Page = Vec<Option<Name>>;

pub struct Map {
    chunks: u64,
    pages: Vec<Option<Name>>,
    /// Those that were changed.
    changed: BTreeMap<u64, Page>,
}

impl Map {
    /// Of a volume of holes.
    pub fn empty(size_bytes: u64) -> Map {
        let chunks = Manifest::chunks_of(size_bytes);
        let pages = vec![None; chunks.div_ceil(PAGE_CHUNKS) as usize];
        Map { chunks, pages, changed: BTreeMap::new() }
    }

    pub fn of(manifest: &Manifest) -> Map {
        let chunks = Manifest::chunks_of(manifest.size_bytes);
        Map { chunks, pages: manifest.pages.clone(), changed: BTreeMap::new() }
    }

    /// The same volume with another size: what lies behind it goes, what is new is a hole.
    ///
    /// # Errors
    /// A page can't be read.
    pub fn resized(mut self, repository: &Repository, size_bytes: u64) -> Result<Map> {
        let chunks = Manifest::chunks_of(size_bytes);
        // The last page of either has another length; a chunk that is cut has other bytes, and whoever resizes writes it.
        for at in [self.chunks, chunks].map(|chunks| chunks.saturating_sub(1) / PAGE_CHUNKS) {
            if at < self.pages.len() as u64 {
                self.page(repository, at)?;
            }
        }
        self.chunks = chunks;
        self.pages.resize(chunks.div_ceil(PAGE_CHUNKS) as usize, None);
        let lens: Vec<u64> = (0..self.pages.len() as u64).map(|at| self.len_of(at)).collect();
        self.changed.retain(|at, _| (*at as usize) < lens.len());
        self.changed.iter_mut().for_each(|(at, page)| page.resize(lens[*at as usize] as usize, None));
        Ok(self)
    }

    pub fn chunks(&self) -> u64 {
        self.chunks
    }

    fn len_of(&self, page: u64) -> u64 {
        PAGE_CHUNKS.min(self.chunks - page * PAGE_CHUNKS)
    }

    fn page(&mut self, repository: &Repository, at: u64) -> Result<&mut Page> {
        if !self.changed.contains_key(&at) {
            let page = self.read_page(repository, at)?;
            self.changed.insert(at, page);
        }
        Ok(self.changed.get_mut(&at).expect("it was just put there"))
    }

    fn read_page(&self, repository: &Repository, at: u64) -> Result<Page> {
        let len = self.len_of(at) as usize;
        let Some(name) = self.pages[at as usize] else { return Ok(vec![None; len]) };
        decode(&name, &repository.chunk(&name)?, len)
    }

    /// # Errors
    /// Its page can't be read.
    pub fn set(&mut self, repository: &Repository, chunk: u64, name: Option<Name>) -> Result<()> {
        self.page(repository, chunk / PAGE_CHUNKS)?[(chunk % PAGE_CHUNKS) as usize] = name;
        Ok(())
    }

    /// How many pages there are.
    pub fn pages(&self) -> u64 {
        self.pages.len() as u64
    }

    /// Chunks that a page lists.
    pub fn listed_in(&self, page: u64) -> Range<u64> {
        page * PAGE_CHUNKS..page * PAGE_CHUNKS + self.len_of(page)
    }

    /// Chunks in a page that are no holes, in order.
    ///
    /// # Errors
    /// It can't be read.
    pub fn named_in(&self, repository: &Repository, page: u64) -> Result<Vec<(u64, Name)>> {
        let names = match self.changed.get(&page) {
            Some(names) => names.clone(),
            None if self.pages[page as usize].is_none() => return Ok(Vec::new()),
            None => self.read_page(repository, page)?,
        };
        Ok(self.listed_in(page).zip(names).filter_map(|(chunk, name)| Some((chunk, name?))).collect())
    }

    /// All chunks that are no holes, in order.
    ///
    /// # Errors
    /// A page can't be read.
    pub fn each(&self, repository: &Repository, mut show: impl FnMut(u64, Name)) -> Result<()> {
        let is_hole = |page: &u64| self.pages[*page as usize].is_none() && !self.changed.contains_key(page);
        let wanted = (0..self.pages()).filter(|page| !is_hole(page));
        in_order(
            wanted,
            |page| self.named_in(repository, page),
            |named| {
                named?.into_iter().for_each(|(chunk, name)| show(chunk, name));
                Ok(())
            },
        )
    }

    /// Bytes of chunks that are no holes, in a volume of that size. `known` has those of pages that were not changed.
    pub fn data_bytes(&self, size_bytes: u64, known: &[u64]) -> u64 {
        let of_page = |page: u64| match self.changed.get(&page) {
            Some(names) => {
                let named = self.listed_in(page).zip(names).filter(|(_, name)| name.is_some());
                named.map(|(chunk, _)| CHUNK_BYTES.min(size_bytes - chunk * CHUNK_BYTES)).sum()
            }
            None => known.get(page as usize).copied().unwrap_or(0),
        };
        (0..self.pages()).map(of_page).sum()
    }

    /// Stores pages that were changed; gives all. One that is there is read first: what it lists can't be had without it.
    ///
    /// # Errors
    /// The store does not take one.
    pub fn store(self, repository: &Repository, mut added: impl FnMut(u64)) -> Result<Vec<Option<Name>>> {
        let Map { mut pages, changed, .. } = self;
        let encoded = changed.into_iter().map(|(at, page)| (at, encode(&page)));
        let is_unreadable = |name: &Name| repository.chunk(name).is_err();
        let put = |(at, bytes): (u64, Option<Vec<u8>>)| {
            (at, bytes.map(|bytes| repository.put_chunk(&bytes, &is_unreadable, &mut Vec::new())).transpose())
        };
        in_order(encoded, put, |(at, stored)| {
            pages[at as usize] = stored?.map(|(name, bytes)| {
                added(bytes);
                name
            });
            Ok(())
        })?;
        Ok(pages)
    }
}

/// Nothing for a page of holes.
fn encode(page: &Page) -> Option<Vec<u8>> {
    page.iter().any(Option::is_some).then(|| page.iter().flat_map(|name| name.map_or([0; 32], |name| name.0)).collect())
}

fn decode(name: &Name, bytes: &[u8], len: usize) -> Result<Page> {
    let (names, rest) = bytes.as_chunks::<32>();
    if names.len() != len || !rest.is_empty() {
        return Err(Error::Damaged(format!("page {name} lists {} chunks of {len}", names.len())));
    }
    Ok(names.iter().map(|name| (*name != [0; 32]).then_some(Name(*name))).collect())
}
