//! Which chunk lies where in a volume: pages of names, read when they are asked for.

use crate::object::Name;
use crate::parallel::in_order;
use crate::{Error, Manifest, Repository, Result};
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

    /// Chunks from `start` on that are no holes, in order.
    ///
    /// # Errors
    /// A page can't be read, or `show` returns one.
    pub fn each(&self, repository: &Repository, start: u64, show: impl FnMut(u64, Name) -> Result<()>) -> Result<()> {
        self.each_readable(repository, start, show, |_, why| Err(why))
    }

    /// The same; `bad` hears of a page that can't be read: which chunks it lists, and why.
    ///
    /// # Errors
    /// Of `show` and `bad`.
    pub fn each_readable(
        &self,
        repository: &Repository,
        start: u64,
        mut show: impl FnMut(u64, Name) -> Result<()>,
        mut bad: impl FnMut(Range<u64>, Error) -> Result<()>,
    ) -> Result<()> {
        let wanted = (start / PAGE_CHUNKS..self.pages.len() as u64)
            .filter(|at| self.changed.contains_key(at) || self.pages[*at as usize].is_some());
        let read = |at: u64| match self.changed.get(&at) {
            Some(page) => (at, Ok(page.clone())),
            None => (at, self.read_page(repository, at)),
        };
        in_order(wanted, read, |(at, page)| {
            let first = at * PAGE_CHUNKS;
            let page = match page {
                Ok(page) => page,
                Err(why) => return bad(first..first + self.len_of(at), why),
            };
            let named = (first..).zip(page).filter_map(|(chunk, name)| Some((chunk, name?)));
            named.filter(|(chunk, _)| *chunk >= start).try_for_each(|(chunk, name)| show(chunk, name))
        })
    }

    /// Names in one page.
    ///
    /// # Errors
    /// It can't be read.
    pub fn named_in(&self, repository: &Repository, page: u64) -> Result<Vec<Name>> {
        Ok(self.read_page(repository, page)?.into_iter().flatten().collect())
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
