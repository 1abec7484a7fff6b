// Conversations in the browser's IndexedDB, and within bounds: the ones that were not used for the longest time go first.

export const MOST_CONVERSATIONS = 300;
export const MOST_BYTES = 4 << 20; // of one conversation, as JSON

let database = null; // stays null where the browser keeps nothing (a private window): the page works on

function done(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

const table = (mode) => database.transaction("conversations", mode).objectStore("conversations");

/** All conversations, the newest first. */
export async function load() {
  try {
    const request = indexedDB.open("nereid", 1);
    request.onupgradeneeded = () => request.result.createObjectStore("conversations", { keyPath: "id" });
    database = await done(request);
    return (await done(table("readonly").getAll())).sort((one, other) => other.updated - one.updated);
  } catch {
    return [];
  }
}

export const isKept = () => database !== null;

/** Throws an Error with a sentence when it is too long or the browser has no room. */
export async function save(conversation) {
  if (!database) return;
  if (JSON.stringify(conversation).length > MOST_BYTES) {
    throw new Error("This conversation is too long to be kept in the browser. Export it and begin a new one.");
  }
  try {
    await done(table("readwrite").put(conversation));
  } catch {
    throw new Error("The browser has no room for this conversation. Export some and delete them.");
  }
}

export async function remove(id) {
  if (database) await done(table("readwrite").delete(id));
}

export async function removeAll() {
  if (database) await done(table("readwrite").clear());
}
