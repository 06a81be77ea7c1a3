// Requests to this server.

let key = sessionStorage.getItem("redline.key") ?? "";

export const theKey = () => key;
export const headers = () => (key ? { Authorization: `Bearer ${key}` } : {});

export function setKey(value) {
  key = value.trim();
  sessionStorage.setItem("redline.key", key);
}

/** An error reported by the server. field: the invalid field of the request. */
export class Refused extends Error {
  constructor(message, field = null) {
    super(message);
    this.field = field;
  }
}

/** The error of a response that is not OK. */
export async function refusal(answer) {
  const text = await answer.text();
  try {
    return told(JSON.parse(text).error);
  } catch {
    return new Refused(text.slice(0, 300) || `status ${answer.status}`);
  }
}

/** An error of the API; its message contains the field. */
export function told({ message, param }) {
  return new Refused(param && !message.includes(param) ? `${param}: ${message}` : message, param);
}

/** The data of an event stream's events. Throws Refused. */
export async function* events(path, how) {
  const answer = await fetch(path, { ...how, headers: { ...headers(), ...how.headers } });
  if (!answer.ok) {
    const why = await refusal(answer);
    if (answer.status === 401) why.message += " Enter a key under Settings.";
    throw why;
  }
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data:")) continue;
      const data = line.slice(5).trim();
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}
